"""Grammars of answers: JSON, JSON of a schema, calls of tools, compiled once at admission.

Owns llguidance, which says a token at a time what may come next. A grammar is compiled apart from
the engine's thread and under a limit of time, so that a bad one costs its own request alone.
Nothing here knows HTTP or how tokens are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from herder.data.tokenizer import Tokenizer
from herder.errors import OverloadedError, RequestError

COMPILE_SECONDS = 5.0
"""The longest that a request waits for its grammar; those of real schemas take milliseconds."""
_NUM_COMPILING = 2
_MAX_GRAMMAR_BYTES = 128 * 2**10
_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Between the parts of JSON: enough to indent it, and no endless blank that a model falls into."""


class Constraint:
    """What one answer may consist of; the engine's TokenConstraint."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], parameter: str) -> None:
        self._matcher, self._end_ids, self._parameter = matcher, end_ids, parameter

    def allowed(self) -> bytes:
        """One bit a token, the first in the lowest bit. Raises RequestError past a limit."""
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token_id: int) -> bool:
        """Go on past a token that was drawn; whether the answer is over with it."""
        self._matcher.consume_token(token_id)
        self._check()
        return token_id in self._end_ids

    def copy(self) -> Constraint:
        """The same from its beginning, for another answer."""
        return Constraint(self._matcher.deep_copy(), self._end_ids, self._parameter)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._parameter, self._matcher.get_error())


class Grammars:
    """Compiles the grammars of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, end_ids: frozenset[int], vocab_size: int) -> None:
        """`end_ids`: every token that ends an answer."""
        self._source, self._end_ids, self._vocab_size = tokenizer, end_ids, vocab_size
        self._threads = ThreadPoolExecutor(_NUM_COMPILING, "herder-grammar")
        self._building = Lock()
        self._built: LLTokenizer | None = None

    def _tokenizer(self) -> LLTokenizer:
        """Built when the first grammar is asked for: it takes seconds for a large vocabulary."""
        with self._building:
            if self._built is None:
                ends = sorted(self._end_ids)
                source = self._source.to_json()
                self._built = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=ends)
            return self._built

    def of_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """JSON that a schema describes. Raises RequestError for a bad or too complex schema."""
        text = json.dumps(schema)
        return self._compiled(
            "response_format",
            lambda: LLMatcher.grammar_from_json_schema(text, overrides=_SPACE),
        )

    def of_calls(self, lark: str) -> Constraint:
        """What a Lark grammar describes, with schemas of tools in it. Raises RequestError."""
        return self._compiled("tools", lambda: LLMatcher.grammar_from_lark(lark))

    def _compiled(self, parameter: str, build: Callable[[], str]) -> Constraint:
        if not self._end_ids:
            raise _refusal(parameter, "the model has no end of text, which has to end it")
        future: Future[LLMatcher] | None = None
        try:
            future = self._threads.submit(_matcher, self._tokenizer(), build)
            return Constraint(future.result(COMPILE_SECONDS), self._end_ids, parameter)
        except TimeoutError:
            if future is not None and future.cancel():
                raise OverloadedError("other grammars are still being compiled") from None
            why = f"compiling it takes longer than {COMPILE_SECONDS:g} s; make it smaller"
            raise _refusal(parameter, why) from None
        except ValueError as error:
            raise _refusal(parameter, str(error)) from None


def _matcher(tokenizer: LLTokenizer, build: Callable[[], str]) -> LLMatcher:
    """A grammar's state machine. Raises ValueError where it is none, or too large."""
    grammar = build()
    if len(grammar) > _MAX_GRAMMAR_BYTES:
        raise ValueError(f"it is longer than {_MAX_GRAMMAR_BYTES} bytes; make it smaller")
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _refusal(parameter: str, why: str) -> RequestError:
    told = " ".join(why.split())
    return RequestError(f"{parameter}: no grammar: {told[:300]}", parameter=parameter)
