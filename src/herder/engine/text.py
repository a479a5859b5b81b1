"""The text of one answer as it grows: what may be shown, and where a stop string ends it.

Text comes from a TextDecoder (the tokenizer's, given in by the caller); nothing here knows ids.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Holds back the longest end of the text that begins a stop string, and cuts at a whole one.

    Only a real prefix is held, so a client sees text as early as it is certain, and never any part
    of a stop string that takes effect.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can be shown now. With `may_stop` false a whole stop string is let by."""
        if not self._stops:
            return text
        pending = self._held + text
        if may_stop:
            start, stop = self._earliest(pending)
            if stop is not None:
                self.found, self._held = stop, ""
                return pending[: start + (len(stop) if self._include_stop else 0)]
        keep = len(pending) - self._num_held(pending)
        self._held = pending[keep:]
        return pending[:keep]

    def finish(self) -> str:
        """The text still held, when no more comes: it was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str | None]:
        """Where the stop string that is complete first begins: as if text came letter by letter."""
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if not ends:
            return -1, None
        end, stop = min(ends, key=lambda found: (found[0], -len(found[1])))
        return end - len(stop), stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string continues."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            ending = text[-length:]
            if any(len(stop) > length and stop.startswith(ending) for stop in self._stops):
                return length
        return 0
