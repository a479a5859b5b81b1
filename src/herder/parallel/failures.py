"""A collective that fails, as an error that names rank, coordinates, step and collective.

gloo raises where a peer is gone ("Connection closed by peer") or late ("Timed out"), without a
word on which collective and which rank. So each rank keeps a note of what it does (`seat.note`),
and a rank that fails tells whether it waited for others or failed by itself. Whoever can see all
notes then finds the cause (`diagnosis`):

* under our launcher they are on its board, in memory that it still reads when ranks are killed;
* under torchrun or Slurm a rank that fails sets an alarm in the store where ranks met. A thread of
  every rank looks for it every two seconds and answers with its note. No answer: it is gone.

During a step this costs nothing but the notes. nccl does not raise: its watchdog ends the process
by SIGABRT after the time-out, which our launcher knows how to read.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from herder.errors import RankError
from herder.observe.trace import Note, Report
from herder.parallel.diagnosis import RankState, diagnose
from herder.parallel.seat import OWN
from herder.parallel.world import Rank

_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 2.5 * _LOOK_SECONDS
_ALARM, _ANSWER = "herder/alarm", "herder/answer/{}"
_MARKS = (
    *("gloo/transport", "Connection closed by peer", "Timed out waiting", "NCCL"),
    *("Socket Timeout", "Broken pipe", "monitoredBarrier"),
)
"""Of messages: gloo's errors are plain RuntimeErrors."""
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py")
_RECORDS = "_dump_fr_trace_json"
"""What torch has recorded. Not public: nothing depends on it but a name in a message."""
_INNER = ("wrapper", "wait", "_wait")
"""Functions of those files that are no collective."""


@contextmanager
def told_failures(alarm: Alarm | None = None) -> Generator[None]:
    """Within it, a collective that fails raises RankError, and any failure is reported.

    alarm: None under our launcher, which sees the reports and tells the cause itself.
    """
    try:
        yield
    except Exception as error:
        failed = _collective_failure(error)
        if failed is None:
            OWN.report_error(error)
            raise
        collective = _name_of_collective(failed)
        reason = str(failed).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        told = f"{collective or 'a collective'} failed ({reason})"
        OWN.report("collective", told, collective=collective)
        assert OWN.rank is not None, "a collective failed in a process that is no rank"
        if alarm is not None:
            raise alarm.raised(OWN.rank) from error
        raise RankError(f"{OWN.where()}{told}", rank=OWN.rank.index) from error


class Alarm:
    """Asks all ranks where they are, through the store where they met, and answers who asks."""

    def __init__(self, store: dist.Store, *, timeout_seconds: float) -> None:
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Alarm:
        """Listen from now on."""
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Listen no more: the store is about to go."""
        self._is_over.set()
        self._thread.join(_LOOK_SECONDS)

    def raised(self, own: Rank) -> RankError:
        """The error after the answers are in. The first rank that fails tells all of it."""
        answers = dict[int, dict[str, Any]]()
        with suppress(Exception):  # the store goes with the rank that holds it
            self._answer()
            self._store.set(_ALARM, "")
            until = time.monotonic() + _ANSWER_SECONDS
            while time.monotonic() < until and len(answers) < own.count:
                time.sleep(_LOOK_SECONDS / 4)
                answers.update(self._read_answers(own.count, answers))
        states = [_state(index, answers.get(index)) for index in range(own.count)]
        if not answers:
            store = "the meeting point is gone, which rank 0 or torchrun held"
            return RankError(f"{OWN.where()}a collective failed, and {store}.", rank=own.index)
        found = diagnose(
            states,
            OWN.mesh_axes,
            timeout_seconds=self._timeout_seconds,
            unix_seconds=time.time(),
        )
        speaker = min(s.index for s in states if s.report and s.report.kind == "collective")
        if own.index != speaker:
            return RankError(
                f"{OWN.where()}ended with the others; see rank {speaker}.", rank=own.index
            )
        if isinstance(found, RankError):
            return found
        return RankError(f"{OWN.where()}ended with others: {found}", rank=own.index)

    def _listen(self) -> None:
        with suppress(Exception):
            while not self._is_over.wait(_LOOK_SECONDS):
                if self._store.check([_ALARM]):
                    self._answer()
                    return

    def _answer(self) -> None:
        assert OWN.rank is not None, "an alarm in a process that is no rank"
        said = {
            "note": asdict(OWN.last_note) if OWN.last_note else None,
            "report": asdict(OWN.last_report) if OWN.last_report else None,
        }
        self._store.set(_ANSWER.format(OWN.rank.index), json.dumps(said))

    def _read_answers(self, count: int, known: dict[int, Any]) -> dict[int, Any]:
        keys = {index: _ANSWER.format(index) for index in range(count) if index not in known}
        return {
            index: json.loads(self._store.get(key))
            for index, key in keys.items()
            if self._store.check([key])
        }


def _state(index: int, answer: dict[str, Any] | None) -> RankState:
    if answer is None:
        return RankState(index=index, ended="gone: it does not answer")
    note, report = answer["note"], answer["report"]
    return RankState(
        index=index,
        ended=None,
        note=Note(**note) if note else None,
        report=Report(**report) if report else None,
    )


def _collective_failure(error: BaseException | None) -> BaseException | None:
    """The error of a failed collective that this one is, or follows from."""
    while error is not None:
        is_marked = isinstance(error, RuntimeError) and any(m in str(error) for m in _MARKS)
        if isinstance(error, dist.DistError) or is_marked:
            return error
        error = error.__cause__ or error.__context__
    return None


def _name_of_collective(error: BaseException) -> str:
    """From the calls that led to the error, else the newest that torch recorded; or empty."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_inner = frame.name in _INNER or frame.name.startswith("_")
        if frame.filename.endswith(_COLLECTIVE_FILES) and not is_inner:
            return frame.name
    with suppress(Exception):
        entries = json.loads(getattr(c10d, _RECORDS)(True, True))["entries"]
        return str(entries[-1]["profiling_name"]).rpartition(":")[2]
    return ""
