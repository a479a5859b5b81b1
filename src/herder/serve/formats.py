"""How an endpoint writes its choices: what the two kinds of completion have in common.

A stream and a whole answer are made of the same entries, so that they cannot differ. The shapes are
chat.py's and completions.py's; nothing here knows HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from herder.data.tokenizer import Tokenizer
from herder.engine.request import Event, Finished, TokenMade

Entry = dict[str, Any]
"""One item of a chunk's `choices`."""


class Format(ABC):
    """Turns the events of choices into entries of chunks, and these into whole choices."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, *, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._has_begun: set[int] = set()

    def entries(self, index: int, event: Event) -> Iterator[Entry]:
        """What an event of a choice adds; the reason of the end is in a last entry of its own."""
        if index not in self._has_begun:
            self._has_begun.add(index)
            yield from self.opening(index, event)
        match event:
            case TokenMade() if event.text or event.logprobs:
                yield self._entry(index, event.text, self.rows(index, event))
            case Finished():
                if event.text:
                    yield self._entry(index, event.text, ())
                ending = {"finish_reason": event.reason, "stop_reason": event.stopped_by}
                yield {**self._entry(index, "", ()), **ending}

    def choice(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """One whole choice made of its entries."""
        logprobs = None
        if self._wants_logprobs:
            parts = [entry["logprobs"] for entry in entries]
            logprobs = {name: [row for part in parts for row in part[name]] for name in parts[-1]}
        whole = {**entries[-1], "logprobs": logprobs}
        return {key: value for key, value in whole.items() if key != "delta"} | self.whole(entries)

    def _entry(self, index: int, text: str, rows: Iterable[Any]) -> Entry:
        logprobs = self.logprobs(list(rows)) if self._wants_logprobs else None
        return {"index": index, **self.part(text), "logprobs": logprobs, "finish_reason": None}

    def token(self, token_id: int) -> str:
        """A token's own text, by which clients know it."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @abstractmethod
    def opening(self, index: int, first: Event) -> Iterator[Entry]:
        """What comes before a choice's first text."""

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """Text as an entry has it."""

    @abstractmethod
    def whole(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The text of all entries as a whole choice has it."""

    @abstractmethod
    def rows(self, index: int, made: TokenMade) -> Iterable[Any]:
        """What `logprobs` needs to know of a token; nothing where it was not scored."""

    @abstractmethod
    def logprobs(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Log-probabilities: lists that are joined by joining them name by name."""
