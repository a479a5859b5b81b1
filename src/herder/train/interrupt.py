"""Ctrl-C, SIGTERM and SIGUSR1 as a wish that the loop reads between steps, not as an exception.

Imports nothing heavy: it is installed before torch is imported, because a scheduler's signal during
those seconds would otherwise kill the process at once.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from herder.parallel.world import STOP_SIGNALS

_ASKS_BEFORE_LEAVING = 3


class StopRequest:
    """Whether, and by which signal, the run was asked to stop.

    The first signal lets the step finish and its state be saved. The second says so once more. The
    third leaves at once without saving: what is on disk stays good, since a checkpoint only gets
    its name when it is whole. Exit status: 128 plus the signal's number: 130, 143 or 138.

    tells: whether it says so; one of several processes that are asked together does.
    """

    def __init__(self, *, tells: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self.num_asked = 0
        self._asked_at: float | None = None
        self._tells = tells
        self._before = list[Any]()

    def __enter__(self) -> StopRequest:
        """Take over these signals, in the main thread."""
        self._before = [signal.signal(number, self._ask) for number in STOP_SIGNALS]
        return self

    def __exit__(self, *_error: object) -> None:
        """Give them back to whoever had them."""
        for number, handler in zip(STOP_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """0 while nobody asked."""
        return 128 + self.signal if self.signal else 0

    @property
    def seconds_since_asked(self) -> float | None:
        """Since the first signal that this process got; None while there is none."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self.num_asked += 1
        self._asked_at = self._asked_at or time.monotonic()
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
