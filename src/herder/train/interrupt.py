"""Ctrl-C and SIGTERM as a wish that the loop reads between steps, not as an exception anywhere.

Imports nothing heavy: it is installed before torch is imported, because a scheduler's signal during
those seconds would otherwise kill the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ASKS_BEFORE_LEAVING = 3


class StopRequest:
    """Whether, and by which signal, the run was asked to stop.

    The first signal lets the step finish and its state be saved. The second says so once more. The
    third leaves at once without saving: what is on disk stays good, since a checkpoint only gets
    its name when it is whole. Exit status: 128 plus the signal's number, 130 or 143.

    tells: whether it says so; one of several processes that are asked together does.
    """

    def __init__(self, *, tells: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self.num_asked = 0
        self._tells = tells
        self._before = list[Any]()

    def __enter__(self) -> StopRequest:
        """Take over both signals, in the main thread."""
        self._before = [signal.signal(number, self._ask) for number in _SIGNALS]
        return self

    def __exit__(self, *_error: object) -> None:
        """Give both signals back to whoever had them."""
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """0 while nobody asked."""
        return 128 + self.signal if self.signal else 0

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self.num_asked += 1
        self.signal = self.signal or signal.Signals(number)
        name = signal.Signals(number).name
        if self.num_asked >= _ASKS_BEFORE_LEAVING:
            self._say(f"{name}: leaving at once; the last whole checkpoint stays")
            os._exit(128 + number)
        again = " (once more leaves at once, without saving)" if self.num_asked > 1 else ""
        self._say(f"{name}: finishing this step, then saving{again}")

    def _say(self, message: str) -> None:
        """Straight to the descriptor: a handler may run in the middle of a buffered write."""
        if self._tells:
            os.write(2, f"\nherder: {message}\n".encode())
