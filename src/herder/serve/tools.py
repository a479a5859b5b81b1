"""Calls of tools: the forms that chat templates teach, the grammar of a call, calls out of text.

A model writes a call as its chat template shows calls, so the template's source tells the form.
What is no call of a given tool stays text, and no text makes the reading fail. Nothing here knows
HTTP.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from herder.data.chat_template import template_reads
from herder.data.tokenizer import Tokenizer
from herder.engine.text import StopFilter
from herder.errors import RequestError
from herder.serve.messages import Tool

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_SPACE = {
    "x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
}
"""As chat templates write JSON, so that models have seen it."""


@dataclass(frozen=True)
class CallForm:
    """How models of one kind write calls: JSON objects of a name and arguments, between marks."""

    signs: tuple[str, ...]
    """What the source of a template that teaches this form has in it."""
    marks: tuple[str, ...]
    """Any of them announces calls; an answer may also begin with one if `is_bare`."""
    glue: tuple[str, ...]
    """What may stand before, between and after calls, besides blanks."""
    arguments: str
    one: str
    """A Lark rule of one call, for str.format: {mark}, {call}."""
    several: str | None
    """The rule of any number of them; None: the form has one alone."""
    is_bare: bool = False

    def lark(self, tokenizer: Tokenizer, tools: Sequence[Tool], *, only_one: bool) -> str:
        """The grammar of an answer that is a call of one of `tools`, or several of them."""
        rule = self.one if only_one or self.several is None else self.several
        lines = ["start: " + rule.replace("MARK", _mark(tokenizer, self.marks[0]))]
        lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool.function.name)}, "{self.arguments}": '
            schema = json.dumps({**_SPACE, **tool.function.schema_of_arguments})
            lines.append(f'call_{i}: {json.dumps(head)} %json {schema} "}}"')
        return "\n".join(lines)


_HERMES = CallForm(
    signs=("<tool_call>",),
    marks=("<tool_call>",),
    glue=("<tool_call>", "</tool_call>"),
    arguments="arguments",
    one=r'MARK "\n" call "\n</tool_call>"',
    several=r'MARK "\n" call "\n</tool_call>" ("\n" MARK "\n" call "\n</tool_call>")*',
)
_MISTRAL = CallForm(
    signs=("[TOOL_CALLS]",),
    marks=("[TOOL_CALLS]",),
    glue=("[TOOL_CALLS]", "[", ",", "]"),
    arguments="arguments",
    one='MARK " "? "[" call "]"',
    several='MARK " "? "[" call (", " call)* "]"',
)
_LLAMA = CallForm(
    signs=('"parameters": ', '"name": '),
    marks=("<|python_tag|>",),
    glue=("<|python_tag|>", ";"),
    arguments="parameters",
    one="call",
    several=None,
    is_bare=True,
)
_OTHERS = ("<function=", "<arg_key>", "[ARGS]", "<|channel|>")
"""Marks of forms that are not JSON objects, in templates that share a mark with those that are."""


def form_of(tokenizer: Tokenizer) -> CallForm:
    """How the model behind `tokenizer` calls. Raises RequestError where its template cannot say."""
    source = tokenizer.chat_template(has_tools=True)
    if source is None or not template_reads(source, "tools"):
        raise RequestError(
            "tools: the model's chat template has no place for tools; leave them out, or give it "
            "a chat_template.jinja that has one",
            parameter="tools",
        )
    if not any(other in source for other in _OTHERS):
        for form in (_HERMES, _MISTRAL, _LLAMA):
            if all(sign in source for sign in form.signs):
                return form
    raise RequestError(
        "tools: the model's chat template writes calls in a form that is not read here; those of "
        "Hermes and Qwen (<tool_call>), Mistral ([TOOL_CALLS]) and Llama 3 (JSON) are",
        parameter="tools",
    )


def shown_marks(tokenizer: Tokenizer, form: CallForm) -> frozenset[int]:
    """Control tokens that must be seen in the text, to know a call by them."""
    ids = (tokenizer.control_token_id(mark) for mark in form.glue)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _mark(tokenizer: Tokenizer, mark: str) -> str:
    token_id = tokenizer.control_token_id(mark)
    return json.dumps(mark) if token_id is None else f"<[{token_id}]>"


class CallReader:
    """Takes one answer's text as it comes, and gives text without calls, and calls."""

    def __init__(self, form: CallForm, names: Sequence[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self.num_calls = 0
        self._text: list[str] = []
        self._deltas: list[dict[str, Any]] = []
        self._held = ""
        """What is text after all if no call comes of it."""
        self._pending = ""
        self._is_told = False
        """Whether the last object is a call."""
        self._state: Callable[[str], None]
        if form.is_bare:
            self._state = self._between
        else:
            self._outside_of_calls()

    def add(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text that can be shown now, and what calls gain: OpenAI's deltas of tool_calls."""
        for char in text:
            self._state(char)
        return self._taken()

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The same for what was held, when no more comes: half a call is text, or cut arguments."""
        if self._state == self._outside:
            self._text.append(self._marks.finish())
        elif not self._is_told:  # after a call only glue is held
            self._text.append(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> tuple[str, list[dict[str, Any]]]:
        text, deltas = "".join(self._text), self._deltas
        self._text, self._deltas = [], []
        return text, deltas

    def _outside_of_calls(self) -> None:
        self._marks = StopFilter(() if self._form.is_bare else self._form.marks)
        self._state = self._outside

    def _outside(self, char: str) -> None:
        self._text.append(self._marks.add(char))
        if self._marks.found is not None:
            self._held, self._pending = self._marks.found, ""
            self._state = self._between

    def _between(self, char: str) -> None:
        """Before, between and after calls: only glue, until an object begins or text does."""
        self._held += char
        self._pending = (self._pending + char).lstrip()
        if self._pending == "{":
            self._json, self._depth, self._is_told, self._is_open = "", 0, False, False
            self._in_string = self._is_escaped = False
            self._state, self._pending = self._inside, ""
            self._inside("{", is_held=True)
        elif self._pending in self._form.glue:
            self._pending = ""
            self._held = "" if self.num_calls else self._held
        elif not any(glue.startswith(self._pending) for glue in self._form.glue):
            self._release()

    def _inside(self, char: str, *, is_held: bool = False) -> None:
        """In an object: its arguments go out as they come, once its name is known."""
        self._held += "" if is_held else char
        self._json += char
        self._count(char)
        if self._is_open:
            self._argue(char)
            self._is_open = self._depth > 1
        elif char == "{" and self._depth == 2 and not self._is_told:
            found = _HEAD.fullmatch(self._json)
            name = json.loads(found.group(1), strict=False) if found else None
            if name in self._names:
                self._begin(name)
                self._argue("{")
                self._is_open = True
        if self._depth == 0:
            self._end()

    def _count(self, char: str) -> None:
        """How deep in braces this character leaves us; those in strings do not count."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in "{}":
            self._depth += 1 if char == "{" else -1

    def _begin(self, name: str) -> None:
        self._is_told = True
        function = {"name": name, "arguments": ""}
        key = secrets.token_hex(5)[:9]  # the length that Mistral's templates insist on
        call = {"index": self.num_calls, "id": key, "type": "function", "function": function}
        self._deltas.append(call)
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        """More of the last call's arguments."""
        if not self._deltas:
            function = {"arguments": ""}
            self._deltas.append({"index": self.num_calls - 1, "function": function})
        self._deltas[-1]["function"]["arguments"] += text

    def _end(self) -> None:
        """An object is complete: a call, also one whose keys come in another order, or text."""
        if not self._is_told:
            try:
                call = json.loads(self._json)
                arguments = call.get("arguments", call.get("parameters", {}))
            except (ValueError, RecursionError):
                call, arguments = {}, None
            name = call.get("name")
            if not (isinstance(arguments, dict) and isinstance(name, str) and name in self._names):
                self._release()
                return
            self._begin(name)
            self._argue(json.dumps(arguments, ensure_ascii=False))
        self._held, self._state = "", self._between

    def _release(self) -> None:
        """What was held is text, and so is what follows, up to the next mark."""
        self._text.append(self._held)
        self._held = ""
        self._outside_of_calls()
