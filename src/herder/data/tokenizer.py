"""Text to token ids and back, with the rules that differ between models read from its files.

Owns what the `tokenizers` library leaves open: beginning of text exactly once, control tokens that
a user typed stay text, every id that ends an answer, the chat template. It knows no corpus, no
model and no server. All methods are safe to call from several threads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from herder.data.chat_template import render_template
from herder.data.detokenize import Detokenizer
from herder.errors import DataError

Messages = Sequence[Mapping[str, Any]]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# An escaped character is its number between two noncharacters (Unicode standard, 23.7).
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_ESCAPED = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class Tokenizer:
    """One model's tokenizer, from the contents of its files. `load_tokenizer` reads them."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        settings: Mapping[str, Any] | None = None,
        configs: Iterable[Mapping[str, Any]] = (),
        chat_template: str | None = None,
        place: str = "The tokenizer",
    ) -> None:
        """`settings`: tokenizer_config.json. `configs`: generation_config.json and config.json.

        `chat_template`: wins over the one in the settings. `place`: where errors say it is from.
        """
        settings = settings or {}
        self._place = place
        self._backend = _build_backend(tokenizer_json, settings, place)
        self._chat_templates = _chat_templates(chat_template, settings.get("chat_template"))
        self.special_tokens = _named_tokens(settings)
        """bos_token, eos_token, ... as text, by name: variables of chat templates."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        """The tokenizer's own end of text; None where it names none."""
        own = set() if self.eos_token_id is None else {self.eos_token_id}
        self.eos_token_ids = frozenset(own.union(*map(_end_ids, configs)))
        """Every id that ends an answer: of the tokenizer, the model's and the generation config."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """The largest id plus 1."""
        added = self._backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self.special_token_ids = frozenset(self._special.values())
        decoder = json.dumps(json.loads(tokenizer_json).get("decoder"))
        self._is_byte_level = '"ByteLevel"' in decoder
        named_bytes = (i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        self._byte_token_ids = frozenset(named_bytes if '"ByteFallback"' in decoder else ())

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that encode documents equally."""
        content = f"{self.end_token_id} {self._backend.to_str()}"
        return hashlib.sha256(content.encode()).hexdigest()

    def to_json(self) -> str:
        """A tokenizer.json with the control tokens that other files name."""
        return self._backend.to_str()

    @cached_property
    def _text_backend(self) -> Backend:
        """The same tokenizer, blind to control tokens: a switch that is not for two threads."""
        backend = deepcopy(self._backend)
        backend.encode_special_tokens = True
        return backend

    @property
    def end_token_id(self) -> int | None:
        """What is written after a training document: the end of text, if there is one."""
        if self.eos_token_id is not None:
            return self.eos_token_id
        return min(self.eos_token_ids, default=None)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of `text`, in which control tokens are read as such.

        With `add_special_tokens` the tokenizer's beginning (and end) of text is added, unless the
        text already begins with it. Raises DataError for half a surrogate pair.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):
            raise DataError(
                f"{text[:40]!r} holds half of a surrogate pair, which is no character."
            ) from None
        return self._with_one_bos(ids)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Whole documents: as the tokenizer begins a text, and `end_token_id` at the end, once.

        What looks like a control token inside a document is text. Uses all cores.
        """
        end = [] if self.end_token_id is None else [self.end_token_id]
        encodings = self._text_backend.encode_batch_fast(list(texts))
        encoded = [self._with_one_bos(encoding.ids) for encoding in encodings]
        return [ids if ids[-1:] == end else ids + end for ids in encoded]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that no token has (a padded vocabulary) have no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, *, context: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A streaming decoder of one answer that follows `context`, the prompt's ids.

        `shown`: control tokens that have a text here.
        """
        hidden = self.special_token_ids - shown
        held = self._byte_token_ids | hidden

        def decode_shown(ids: Sequence[int]) -> str:
            return self.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

        return Detokenizer(
            decode_shown if shown else self.decode,
            ends_no_text=lambda i: i in held or self._backend.id_to_token(i) is None,
            context=context,
        )

    def num_bytes(self, token_id: int) -> int:
        """How many UTF-8 bytes of text a token stands for; 0 for a control token."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self.special_token_ids:
            return 0
        if token_id in self._byte_token_ids:
            return 1
        return len(token) if self._is_byte_level else len(self.decode([token_id]).encode())

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's files say how a chat is written."""
        return bool(self._chat_templates)

    def chat_template(self, *, has_tools: bool) -> str | None:
        """The source that writes a chat with or without tools; None where the model has none."""
        preferred = ["tool_use", "default"] if has_tools else ["default"]
        names = [*preferred, *self._chat_templates]
        return next((self._chat_templates[n] for n in names if n in self._chat_templates), None)

    def control_token_id(self, text: str) -> int | None:
        """The id of the control token that is written so; None where there is none."""
        return self._special.get(text)

    def render_chat(self, messages: Messages, **variables: Any) -> str:
        """The chat as the model reads it.

        `variables` go to the template: tools, add_generation_prompt (True unless given) and its
        own. Raises DataError where there is no template, or it rejects the messages.
        """
        template = self.chat_template(has_tools=bool(variables.get("tools")))
        if template is None:
            raise DataError(
                f"{self._place} has no chat template. Use plain completion instead of chat, or put "
                "a chat_template.jinja beside its tokenizer."
            )
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        given = {**defaults, **self.special_tokens, **variables, "messages": list(messages)}
        return render_template(template, given)

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """The ids of `render_chat`. Only the template writes control tokens: what looks like one in
        a message or a variable is text. Beginning of text is the template's to write, and is there
        at most once.
        """
        escaped = [self._escape(each) for each in messages]
        rendered = self.render_chat(escaped, **self._escape(variables))
        if _OPEN not in rendered:
            return self.encode(rendered, add_special_tokens=False)
        # Control tokens cut a text into parts that are encoded by themselves.
        ids: list[int] = []
        end = 0
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            # A part may have the control token for unknown characters in it.
            if self._special.get(rendered[start:stop].strip()) == token_id:
                ids += [*self._escaped_ids(rendered[end:start]), token_id]
                end = stop
        return self._with_one_bos(ids + self._escaped_ids(rendered[end:]))

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        is_doubled = self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if is_doubled else ids

    @cached_property
    def _escape_pattern(self) -> re.Pattern[str]:
        """Any control token, the longest that fits, and what escapes are written with."""
        contents = sorted(self._special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, [*contents, _OPEN, _CLOSE])))

    def _escape(self, value: Any) -> Any:
        """A message in which no control token can be read; `_escaped_ids` is told what they were.

        Every character of one is escaped: what is left of a token may hold another.
        """
        if isinstance(value, str):
            return self._escape_pattern.sub(
                lambda found: "".join(f"{_OPEN}{ord(each)}{_CLOSE}" for each in found.group()),
                value,
            )
        if isinstance(value, Mapping):
            return {key: self._escape(item) for key, item in value.items()}
        return list(map(self._escape, value)) if isinstance(value, (list, tuple)) else value

    def _escaped_ids(self, text: str) -> list[int]:
        text = _ESCAPED.sub(lambda found: chr(int(found.group(1))), text)
        return self._text_backend.encode(text, add_special_tokens=False).ids


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model's folder, or a single tokenizer.json.

    Reads, where they lie beside it, tokenizer_config.json, generation_config.json, config.json and
    chat_template.jinja. Raises DataError where a file is missing or damaged.
    """
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"No tokenizer at {path}: {file} does not exist.")
    template = file.with_name("chat_template.jinja")
    return Tokenizer(
        _read(file),
        settings=_read_object(file.with_name("tokenizer_config.json")),
        configs=[
            _read_object(file.with_name(name)) for name in ("generation_config.json", "config.json")
        ],
        chat_template=_read(template) if template.is_file() else None,
        place=str(path),
    )


def check_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, model: str) -> None:
    """Raise DataError where the tokenizer can make ids that the model has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"The tokenizer makes ids up to {tokenizer.vocab_size - 1}, but {model} has vocab_size="
            f"{vocab_size}: {tokenizer.vocab_size - vocab_size} tokens have no embedding. Use the "
            f"model's own tokenizer, or a vocab_size of at least {tokenizer.vocab_size}."
        )


def _build_backend(tokenizer_json: str, settings: Mapping[str, Any], place: str) -> Backend:
    """The library's tokenizer, without the truncation and padding that its file may ask for.

    `settings`: tokenizer_config.json, whose add_bos_token and add_eos_token override the file.
    """
    try:
        backend = Backend.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{place}: tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    named = _named_tokens(settings)
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


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`*_token` keys of tokenizer_config.json: strings, or objects with their content."""
    named = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named


def _end_ids(config: Mapping[str, Any]) -> set[int]:
    given = [(part or {}).get("eos_token_id") for part in (config, config.get("text_config"))]
    ids = [i for each in given for i in (each if isinstance(each, list) else [each])]
    return {i for i in ids if type(i) is int}


def _chat_templates(file: str | None, setting: object) -> dict[str, str]:
    """Templates by name. The file wins over the key of tokenizer_config.json, as published."""
    named = setting if isinstance(setting, list) else []
    templates = {entry["name"]: entry["template"] for entry in named}
    default = file or setting
    return {**templates, "default": default} if isinstance(default, str) else templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not a JSON object.")
    return content
