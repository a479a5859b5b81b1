"""Text to token ids and back, with the rules that differ between models read from its files.

Owns what the `tokenizers` library leaves open: beginning of text exactly once, control tokens that
a user typed stay text, every id that ends an answer, the chat template. It knows no corpus, no
model and no server. All methods are safe to call from several threads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from herder.data.chat_template import compile_template
from herder.data.detokenize import Detokenizer
from herder.data.tokenizer_backend import build_backend, named_tokens
from herder.errors import DataError

Messages = Sequence[Mapping[str, Any]]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Noncharacters (Unicode standard, 23.7): no text holds them, and a forged pair only makes text.
_MARK_OPEN, _MARK_CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_MARK_OPEN}([0-9]+){_MARK_CLOSE}")


class Tokenizer:
    """One model's tokenizer. Build it with `load_tokenizer` or `build_tokenizer`."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        settings: Mapping[str, Any],
        eos_token_ids: frozenset[int],
        chat_templates: Mapping[str, str],
        place: str,
    ) -> None:
        """`settings`: tokenizer_config.json. `place`: where errors say the tokenizer is from."""
        self._backend = build_backend(tokenizer_json, settings, place)
        self._sources = (tokenizer_json, settings, place)
        self._place = place
        self._chat_templates = dict(chat_templates)
        self._compiled: dict[str, Callable[..., str]] = {}
        self.special_tokens = named_tokens(settings)
        """bos_token, eos_token, ... as text, by name: variables of chat templates."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        """The tokenizer's own end of text; None where it names none."""
        own = frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})
        self.eos_token_ids = own | eos_token_ids
        """Every id that ends an answer: of the tokenizer, the model's and the generation config."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """The largest id plus 1."""
        added = self._backend.get_added_tokens_decoder()
        self._special = {token.content: (i, token) for i, token in added.items() if token.special}
        self.special_token_ids = frozenset(i for i, _ in self._special.values())
        decoder = json.dumps(json.loads(tokenizer_json).get("decoder"))
        self._is_byte_level = '"ByteLevel"' in decoder
        self.byte_token_ids = (
            frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
            if '"ByteFallback"' in decoder
            else frozenset()
        )

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that encode documents equally."""
        content = f"{self.end_token_id} {self._backend.to_str()}"
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def _text_backend(self) -> Backend:
        """The same tokenizer, blind to control tokens: a switch that is not for two threads."""
        backend = build_backend(*self._sources)
        backend.encode_special_tokens = True
        return backend

    @property
    def end_token_id(self) -> int | None:
        """What is written after a training document: the end of text, if there is one."""
        if self.eos_token_id is not None:
            return self.eos_token_id
        return min(self.eos_token_ids, default=None)

    def encode(
        self, text: str, *, add_special_tokens: bool, control_tokens_are_text: bool = False
    ) -> list[int]:
        """The ids of `text`.

        With `add_special_tokens` the tokenizer's beginning (and end) of text is added, unless the
        text already begins with it. With `control_tokens_are_text` nothing in `text` becomes a
        control token. Raises DataError for half a surrogate pair.
        """
        options = {"control_tokens_are_text": control_tokens_are_text}
        return self.encode_batch([text], add_special_tokens=add_special_tokens, **options)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        control_tokens_are_text: bool = False,
    ) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        backend = self._text_backend if control_tokens_are_text else self._backend
        try:
            encodings: list[Encoding] = backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError):
            bad = next(text for text in texts if not _is_encodable(text))
            raise DataError(
                f"{bad[:40]!r} holds half of a surrogate pair, which is no character."
            ) from None
        return [self._with_one_bos(encoding.ids) for encoding in encodings]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Training documents: as the tokenizer begins a text, and `end_token_id` at the end, once.

        What looks like a control token inside a document is text.
        """
        encoded = self.encode_batch(texts, add_special_tokens=True, control_tokens_are_text=True)
        end = self.end_token_id
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that no token has (a padded vocabulary) have no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A streaming decoder of one answer that follows `context`, the prompt's ids."""
        return Detokenizer(self, context=context, skip_special_tokens=skip_special_tokens)

    def is_token(self, token_id: int) -> bool:
        """Whether the vocabulary has this id: a model's may be padded, or have holes."""
        return self._backend.id_to_token(token_id) is not None

    def num_bytes(self, token_id: int) -> int:
        """How many UTF-8 bytes of text a token stands for; 0 for a control token."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self.special_token_ids:
            return 0
        if token_id in self.byte_token_ids:
            return 1
        return len(token) if self._is_byte_level else len(self.decode([token_id]).encode())

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The chat as the model reads it. `variables` go to the template (enable_thinking=False).

        Raises DataError where the model has no template, or its template rejects the messages.
        """
        return self._template(with_tools=bool(tools))(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of `render_chat`. Only the template writes control tokens: what looks like one in
        a message is text. Beginning of text is the template's to write, and is there at most once.
        """
        marked, typed = self._mark_control_tokens(messages)
        rendered = self.render_chat(
            marked, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        if not typed:
            return self.encode(rendered, add_special_tokens=False)
        return self._with_one_bos(self._encode_marked(rendered, typed))

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def _template(self, *, with_tools: bool) -> Callable[..., str]:
        if not self._chat_templates:
            raise DataError(
                f"{self._place} has no chat template. Use plain completion instead of chat, or put "
                "a chat_template.jinja beside its tokenizer."
            )
        preferred = ("tool_use", "default") if with_tools else ("default",)
        known = self._chat_templates
        name = next((name for name in preferred if name in known), next(iter(known)))
        if name not in self._compiled:
            self._compiled[name] = compile_template(known[name])
        return self._compiled[name]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Any control token, the longest that fits."""
        contents = sorted(self._special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    def _mark_control_tokens(self, messages: Messages) -> tuple[list[Any], list[str]]:
        """The messages with a mark for each control token in them, and what was replaced."""
        typed: list[str] = []

        def mark(match: re.Match[str]) -> str:
            typed.append(match.group())
            return f"{_MARK_OPEN}{len(typed) - 1}{_MARK_CLOSE}"

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return self._special_pattern.sub(mark, value) if self._special_pattern else value
            if isinstance(value, Mapping):
                return {key: walk(item) for key, item in value.items()}
            return [walk(item) for item in value] if isinstance(value, (list, tuple)) else value

        return [walk(message) for message in messages], typed

    def _encode_marked(self, rendered: str, typed: list[str]) -> list[int]:
        """The ids of a rendered chat in which marks stand for what the messages had typed.

        Control tokens cut a text into parts that are encoded by themselves, so this gives the ids
        the tokenizer would give if it could tell the template's control tokens from the typed ones.
        """

        def restore(match: re.Match[str]) -> str:
            index = int(match.group(1))
            return typed[index] if index < len(typed) else match.group()

        assert self._special_pattern is not None, f"{len(typed)} control tokens, but none is known"
        ids: list[int] = []
        end, strip_next = 0, False
        for match in [*self._special_pattern.finditer(rendered), None]:
            text = rendered[end : match.start() if match else len(rendered)]
            token_id, token = self._special[match.group()] if match else (None, None)
            text = text.lstrip() if strip_next else text
            text = text.rstrip() if token is not None and token.lstrip else text
            ids += self.encode(
                _MARK.sub(restore, text), add_special_tokens=False, control_tokens_are_text=True
            )
            if match and token_id is not None and token is not None:
                ids.append(token_id)
                end, strip_next = match.end(), token.rstrip
        return ids


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model's folder, or a single tokenizer.json.

    Reads tokenizer.json and, where they are, tokenizer_config.json, generation_config.json,
    config.json and chat_template.jinja. Raises DataError where one is missing or damaged.
    """
    path = Path(path).expanduser()
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"No tokenizer at {path}: {file} does not exist.")
    if not path.is_dir() and path.name != "tokenizer.json":
        return build_tokenizer(_read(file), place=str(path))
    template = folder / "chat_template.jinja"
    return build_tokenizer(
        _read(file),
        tokenizer_config=_read_object(folder / "tokenizer_config.json"),
        generation_config=_read_object(folder / "generation_config.json"),
        model_config=_read_object(folder / "config.json"),
        chat_template=_read(template) if template.is_file() else None,
        place=str(path),
    )


def build_tokenizer(
    tokenizer_json: str,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    place: str = "The tokenizer",
) -> Tokenizer:
    """A tokenizer from the contents of a model's files; absent ones are None."""
    settings = dict(tokenizer_config or {})
    ends: set[int] = set()
    for config in (generation_config or {}, model_config or {}):
        for holder in (config, config.get("text_config") or {}):
            given = holder.get("eos_token_id")
            ends.update([given] if isinstance(given, int) else given or ())
    return Tokenizer(
        tokenizer_json,
        settings=settings,
        eos_token_ids=frozenset(ends),
        chat_templates=_chat_templates(chat_template, settings.get("chat_template")),
        place=place,
    )


def check_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, model: str) -> None:
    """Raise DataError where the tokenizer can make ids that the model has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"The tokenizer makes ids up to {tokenizer.vocab_size - 1}, but {model} has vocab_size="
            f"{vocab_size}: {tokenizer.vocab_size - vocab_size} tokens have no embedding. Use the "
            f"model's own tokenizer, or a vocab_size of at least {tokenizer.vocab_size}."
        )


def _chat_templates(file: str | None, setting: object) -> dict[str, str]:
    """Templates by name. The file wins over the key of tokenizer_config.json, as published."""
    templates: dict[str, str] = {}
    if isinstance(setting, str):
        templates["default"] = setting
    elif isinstance(setting, list):
        templates |= {entry["name"]: entry["template"] for entry in setting}
    if file is not None:
        templates["default"] = file
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not a JSON object.")
    return content


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
