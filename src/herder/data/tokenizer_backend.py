"""The `tokenizers` library's object, set up as a model's tokenizer_config.json says.

Owns beginning and end of text, named tokens, and switching off the truncation and padding that a
stored tokenizer may do unasked. It knows no chat, no corpus and no streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from herder.errors import DataError


def build_backend(tokenizer_json: str, settings: Mapping[str, Any], place: str) -> Tokenizer:
    """The library's tokenizer, without the truncation and padding that its file may ask for.

    `settings`: tokenizer_config.json, whose add_bos_token and add_eos_token override the file.
    """
    try:
        backend = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{place}: tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    named = named_tokens(settings)
    ends = {name: named[name] for name in ("bos_token", "eos_token") if name in named}
    for name, token in ends.items():
        if backend.token_to_id(token) is None:
            raise DataError(f"{place}: {name} {token!r} is not in the vocabulary.")
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    if "add_bos_token" in settings or "add_eos_token" in settings:
        bos, eos = (
            [ends[name]] if name in ends and settings.get(f"add_{name}") else []
            for name in ("bos_token", "eos_token")
        )
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
        )
    return backend


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` keys of tokenizer_config.json: strings, or objects with their content."""
    named = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named
