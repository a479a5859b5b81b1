"""What a rank did and entered, as lines of a file that outlives it.

A trace has its newest lines in `rank-00003.jsonl` and those before in `rank-00003.before.jsonl`.
Owns the format. Which collectives there are is not its affair, nor whose fault a hang is (`hangs`).
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Literal

TRACES, TRACES_BEFORE = "collectives", "collectives-before"
"""The folders of a run directory that traces are in: of its newest start, and of the one before."""
LINES_A_FILE = 5_000
"""About 1 MB, and some steps of a large model."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Whose trace it is."""

    rank: int
    num_ranks: int
    place: str
    """On the mesh, as `dp 0, tp 3`; empty without any axis longer than 1."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group, told before its first call."""

    name: str
    axis: str
    """Of the mesh: `dp`, or `dp_cp` for several; `world`: all ranks, which are no single axis."""
    ranks: list[int]


@dataclass(frozen=True)
class Note:
    """What a rank began to do."""

    unix_seconds: float
    step: int | None
    """Counted from 1; None outside of steps."""
    what: str

    def __str__(self) -> str:
        return self.what if self.step is None else f"step {self.step}, {self.what}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that the rank entered, or its end of a transfer between two ranks."""

    unix_seconds: float
    step: int | None
    name: str
    axis: str
    sequence: int
    """Counted from 1 by all ranks of the group alike; of a transfer, by both of its ends."""
    shapes: list[list[int]]
    """Of its tensors, as the operator takes them."""
    group: str
    peer: int | None = None
    """The other rank of a transfer."""

    def __str__(self) -> str:
        shapes = " ".join(str(shape).replace(" ", "") for shape in self.shapes)
        to = "" if self.peer is None else f" {'to' if self.name == 'send' else 'from'} {self.peer}"
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.name}{to} {shapes}, number {self.sequence} on axis {self.axis}{step}"


Kind = Literal["told", "bug", "collective", "done"]
"""told: an error whose message says everything; bug: any other exception; collective: it waited for
ranks that did not come, or whose connection broke; done: no error, its work is done."""


@dataclass(frozen=True)
class Report:
    """Why a rank is about to end."""

    unix_seconds: float
    kind: Kind
    exit_status: int
    collective: str
    """Its name, or empty."""
    text: str


Line = Head | Group | Note | Call | Report
_KINDS: dict[str, type[Line]] = {kind.__name__: kind for kind in (Head, Group, Note, Call, Report)}


class TraceFile:
    """Writes a trace, each line by one call of the system: what a process wrote before it was
    killed is there. A disk that cannot be written is told once, and ends it.
    """

    def __init__(self, folder: Path, head: Head) -> None:
        """The file is there from the first line on."""
        self._path = folder / f"rank-{head.rank:05d}.jsonl"
        self._repeated: list[Line] = [head]
        self._file: FileIO | None = None
        self._num_left = 0
        self._is_broken = False
        self._lock = threading.Lock()

    def write(self, line: Line) -> None:
        """Add one line; threads may."""
        with self._lock:
            try:
                if not self._is_broken:
                    self._append(line)
            except OSError as error:
                self._is_broken = True
                print(f"herder: {self._path.name}: no more is traced: {error}", file=sys.stderr)
            if isinstance(line, Group):
                self._repeated.append(line)

    def close(self) -> None:
        """Nothing is written any more."""
        if self._file is not None:
            self._file.close()

    def _append(self, line: Line) -> None:
        lines = [line]
        if self._num_left == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._file is not None:
                self.close()
                self._path.replace(self._path.with_suffix(".before.jsonl"))
            self._file, self._num_left = self._path.open("wb", buffering=0), LINES_A_FILE
            lines = [*self._repeated, line]
        assert self._file is not None, "a line before the file was opened"
        for each in lines:
            told = json.dumps({"line": type(each).__name__, **vars(each)})
            self._file.write(told.encode() + b"\n")
        self._num_left -= 1


@dataclass(kw_only=True)
class Trace:
    """What is left of one rank; of one without a file, nothing."""

    place: str = ""
    groups: dict[str, list[int]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    """Oldest first: those of the newest 5,000 lines, and of up to as many before."""
    note: Note | None = None
    ending: Report | None = None


def read_traces(folder: Path) -> dict[int, Trace]:
    """By rank, a trace for every rank of the run; empty where nothing was traced.

    Ranks that left no file have an empty one. A line torn by a kill is passed over.
    """
    traces, num_ranks = defaultdict[int, Trace](Trace), 0
    for path in sorted(folder.glob("rank-*.jsonl")):  # `.before.jsonl` sorts before `.jsonl`
        trace = Trace()
        for line in map(_read, path.read_bytes().splitlines()):
            match line:
                case Head():
                    num_ranks, trace = max(num_ranks, line.num_ranks), traces[line.rank]
                    trace.place = line.place
                case Group():
                    trace.groups[line.name] = line.ranks
                case Note():
                    trace.note = line
                case Call():
                    trace.calls.append(line)
                case Report():
                    trace.ending = line
    return {rank: traces[rank] for rank in range(num_ranks)}


def _read(text: bytes) -> Line | None:
    try:
        fields = json.loads(text)
        return _KINDS[fields.pop("line")](**fields)
    except (ValueError, KeyError, TypeError):
        return None
