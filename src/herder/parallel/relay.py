"""The lines of many ranks as one log: prefixed, and told once where several say the same.

Owns the reading ends of the ranks' pipes. Rank 0 has none: it writes where the launcher writes.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections import Counter
from typing import TextIO

from herder.units import format_ranks

_GATHER_SECONDS = 0.5
"""How long a line is held, so that ranks which say the same can be named; later ones are not."""
_REMEMBERED_LINES = 10_000
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
"""torch puts it before a traceback once a process group exists."""


class Relay:
    """Passes on what ranks write. `pump` must be called often: a full pipe stops its writer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._selector = selectors.DefaultSelector()
        self._unfinished = dict[int, bytes]()
        self._held = dict[tuple[int, str], list[int]]()
        """(which time a rank says this, line) -> ranks."""
        self._said = Counter[tuple[int, str]]()
        """By rank and line, how often."""
        self._told = dict[str, int]()
        """How often a line was told, which is how often the rank said it that said it most."""
        self._held_since = 0.0

    def add(self, rank: int, descriptor: int) -> None:
        """Read a rank's lines from there, and close it at the end."""
        self._selector.register(descriptor, selectors.EVENT_READ, rank)
        self._unfinished[rank] = b""

    def pump(self, timeout_seconds: float) -> None:
        """Wait for lines, at most so long, and tell those that were held long enough."""
        if not self._selector.get_map():
            time.sleep(timeout_seconds)
        for key, _events in self._selector.select(timeout_seconds if not self._held else 0.02):
            self._read(key.fd, key.data)
        if self._held and time.monotonic() - self._held_since >= _GATHER_SECONDS:
            self._tell()

    def close(self) -> None:
        """Tell everything that was written until now, and close the pipes."""
        while keys := self._selector.select(0):
            for key, _events in keys:
                self._read(key.fd, key.data)
        for key in list(self._selector.get_map().values()):
            self._finish(key.fd, key.data)  # something that a rank started holds it open
        self._selector.close()
        self._tell()

    def _read(self, descriptor: int, rank: int) -> None:
        read = os.read(descriptor, 1 << 16)
        if not read:
            self._finish(descriptor, rank)
            return
        *lines, self._unfinished[rank] = (self._unfinished[rank] + read).split(b"\n")
        for line in lines:
            self._hold(rank, line)

    def _finish(self, descriptor: int, rank: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if self._unfinished[rank]:
            self._hold(rank, self._unfinished.pop(rank))

    def _hold(self, rank: int, line: bytes) -> None:
        text = _TORCH_PREFIX.sub("", line.decode(errors="replace").rstrip("\r"))
        if len(self._said) > _REMEMBERED_LINES:
            self._said.clear()
            self._told.clear()
        self._said[rank, text] += 1
        key = self._said[rank, text], text
        if key in self._held:
            self._held[key].append(rank)
        elif key[0] > self._told.get(text, 0):
            self._held_since = self._held_since if self._held else time.monotonic()
            self._held[key] = [rank]
            self._told[text] = key[0]

    def _tell(self) -> None:
        for (_time, text), ranks in self._held.items():
            self._stream.write(f"[{format_ranks(sorted(ranks))}] {text}\n")
        self._stream.flush()
        self._held.clear()
