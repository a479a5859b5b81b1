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
    """The library's tokenizer, without the truncation and padding that its file may ask for."""
    try:
        backend = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{place}: tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    named = named_tokens(settings)
    for name in ("bos_token", "eos_token"):
        token = named.get(name)
        if token is not None and backend.token_to_id(token) is None:
            raise DataError(f"{place}: {name} {token!r} is not in the vocabulary.")
        if token is not None:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    if "add_bos_token" in settings or "add_eos_token" in settings:
        backend.post_processor = _begin_and_end(backend, settings, named)
    return backend


def _begin_and_end(
    backend: Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]
) -> processors.TemplateProcessing:
    """What add_bos_token and add_eos_token say, which overrides tokenizer.json."""
    bos = named.get("bos_token") if settings.get("add_bos_token") else None
    eos = named.get("eos_token") if settings.get("add_eos_token") else None
    used = [token for token in (bos, eos) if token is not None]
    parts = [part for part in (bos, "$A", eos) if part is not None]
    return processors.TemplateProcessing(
        single=parts,
        pair=[*parts, "$B:1"],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` keys of tokenizer_config.json: strings, or objects with their content."""
    named = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named
