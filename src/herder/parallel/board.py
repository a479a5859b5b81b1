"""What every rank is doing and how it failed, in memory that outlives a killed process.

One file without a name, mapped by the launcher and by each rank it started: a note costs a
microsecond and no collective, and is still there when a rank is gone or hangs. Imports no torch.

    rank's slot:  [ note: time, step, what ]  [ report: time, kind, status, collective, text ]
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import cast

from herder.observe.trace import Kind, Note, Report

_NOTE_BYTES = 512
_SLOT_BYTES = 8192
_LENGTH = struct.Struct("<H")


class Board:
    """A slot for each rank's newest note and its report. A rank writes to its own alone."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.descriptor = descriptor
        """Of the file, for a process that inherits it."""
        self._memory = mmap.mmap(descriptor, num_ranks * _SLOT_BYTES)

    @classmethod
    def create(cls, num_ranks: int) -> Board:
        """A board that nobody has written to."""
        descriptor, name = tempfile.mkstemp(prefix="herder-")
        Path(name).unlink()
        os.ftruncate(descriptor, num_ranks * _SLOT_BYTES)
        return cls(descriptor, num_ranks)

    def close(self) -> None:
        """Forget it here; others that map it still have it."""
        self._memory.close()
        os.close(self.descriptor)

    def note(self, rank: int, note: Note) -> None:
        """Say what a rank does from now on."""
        step = "" if note.step is None else str(note.step)
        self._write(rank, 0, _NOTE_BYTES, (repr(note.unix_seconds), step, note.what))

    def report(self, rank: int, report: Report) -> None:
        """Say why a rank ends. A text too long for the slot loses its end."""
        fields = (
            *(repr(report.unix_seconds), report.kind, str(report.exit_status)),
            *(report.collective, report.text),
        )
        self._write(rank, _NOTE_BYTES, _SLOT_BYTES - _NOTE_BYTES, fields)

    def last_note(self, rank: int) -> Note | None:
        """None: it has not said anything."""
        fields = self._read(rank, 0)
        if len(fields) != 3:
            return None
        return Note(float(fields[0]), int(fields[1]) if fields[1] else None, fields[2])

    def last_report(self, rank: int) -> Report | None:
        """None: it has not failed, or had no time to say so."""
        fields = self._read(rank, _NOTE_BYTES)
        if len(fields) != 5:
            return None
        seconds, kind, status, collective, text = fields
        return Report(float(seconds), cast("Kind", kind), int(status), collective, text)

    def _write(self, rank: int, offset: int, size: int, fields: tuple[str, ...]) -> None:
        encoded = "\0".join(fields).encode(errors="replace")[: size - _LENGTH.size]
        start = rank * _SLOT_BYTES + offset
        body = start + _LENGTH.size
        self._memory[start:body] = _LENGTH.pack(0)  # a reader meets nothing, or all of it
        self._memory[body : body + len(encoded)] = encoded
        self._memory[start:body] = _LENGTH.pack(len(encoded))

    def _read(self, rank: int, offset: int) -> list[str]:
        start = rank * _SLOT_BYTES + offset
        body = start + _LENGTH.size
        (length,) = _LENGTH.unpack(self._memory[start:body])
        return self._memory[body : body + length].decode(errors="replace").split("\0")
