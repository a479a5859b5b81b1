"""Whose fault it was: from what became of each rank, its last note and its report, one message.

Where one rank dies or hangs, all others fail too, some of them sooner. Owns telling the cause from
its consequences. Pure: knows neither processes nor process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from herder.errors import HerderError, RankError, TrainingError, UserError
from herder.observe.trace import Note, Report
from herder.parallel.world import coordinates
from herder.units import format_ranks

_TIMED_OUT_SHARE = 0.9
"""Of the time-out: a rank that aborts after so long in one phase was waiting, as under nccl, whose
watchdog ends the process from within."""
_WHAT_NEXT = (
    "All ranks were ended. The same command goes on from the newest checkpoint, if one was saved."
)


@dataclass(frozen=True)
class RankState:
    """What is known of one rank when the first of them has failed."""

    index: int
    ended: str | None
    """How, as `killed by SIGKILL`; None: it is still there."""
    is_aborted: bool = False
    """Whether it ended itself by SIGABRT."""
    note: Note | None = None
    report: Report | None = None


def diagnose(
    states: Sequence[RankState],
    mesh_axes: Mapping[str, int],
    *,
    timeout_seconds: float,
    unix_seconds: float,
) -> HerderError:
    """The error that names the rank at fault: RankError, or what ranks said themselves."""
    culprit = _own_failure(states, timeout_seconds, unix_seconds)
    if culprit is not None and culprit.report is not None and culprit.report.kind == "told":
        return _told(culprit, states, mesh_axes)
    if culprit is not None and culprit.report is not None:
        fault = f"{culprit.report.text}{_during(culprit)}"
    elif culprit is not None:
        fault = f"{culprit.ended}{_during(culprit)}"
    else:
        culprit = _missing(states, timeout_seconds, unix_seconds)
        fault = _absence(culprit, states, timeout_seconds, unix_seconds)
    place = coordinates(culprit.index, mesh_axes)
    lines = [f"{place}: {fault}." if place else f"{fault}.", *_others(culprit, states)]
    lines.append(f"  {_WHAT_NEXT}")
    return RankError("\n".join(lines), rank=culprit.index)


def is_cause_gone(
    states: Sequence[RankState], *, timeout_seconds: float, unix_seconds: float
) -> bool:
    """Whether a rank that failed by itself has ended. Its peers' connections break by that, and not
    by its report: only from then on can they say where they waited for it.
    """
    culprit = _own_failure(states, timeout_seconds, unix_seconds)
    return culprit is not None and culprit.ended is not None


def _own_failure(
    states: Sequence[RankState], timeout_seconds: float, unix_seconds: float
) -> RankState | None:
    """The rank that died or raised an error of its own: one that died without a word first."""
    dead = [
        state
        for state in states
        if state.ended and not state.report and not _waited(state, timeout_seconds, unix_seconds)
    ]
    own = [state for state in states if state.report and state.report.kind != "collective"]
    own.sort(key=lambda state: state.report.unix_seconds if state.report else 0.0)
    return next(iter(dead + own), None)


def _waited(state: RankState, timeout_seconds: float, unix_seconds: float) -> bool:
    if not state.is_aborted or state.note is None:
        return False
    return unix_seconds - state.note.unix_seconds >= _TIMED_OUT_SHARE * timeout_seconds


def _missing(states: Sequence[RankState], timeout_seconds: float, unix_seconds: float) -> RankState:
    """The rank that did not come: silent while others complained, or else the one that was last."""
    silent = [state for state in states if not state.ended and not state.report]
    if silent:
        return min(silent, key=lambda state: state.note.unix_seconds if state.note else 0.0)
    waiting = [state for state in states if not _waited(state, timeout_seconds, unix_seconds)]
    return max(waiting or states, key=lambda state: state.note.unix_seconds if state.note else 0.0)


def _told(
    culprit: RankState, states: Sequence[RankState], mesh_axes: Mapping[str, int]
) -> HerderError:
    """What a rank said itself; the rank is named where rank 0 had nothing to object."""
    report = culprit.report
    assert report is not None, f"rank {culprit.index} said nothing"
    same = [s.index for s in states if s.report is not None and s.report.text == report.text]
    text = report.text
    if 0 not in same:
        place = coordinates(culprit.index, mesh_axes)
        text = f"{format_ranks(same)}{f' ({place})' if place else ''}: {text}"
    return UserError(text) if report.exit_status == UserError.exit_status else TrainingError(text)


def _absence(
    culprit: RankState, states: Sequence[RankState], timeout_seconds: float, unix_seconds: float
) -> str:
    names = [s.report.collective for s in states if s.report and s.report.collective]
    met = f"the others in {names[0]}" if names else "the others"
    if culprit.report is not None:
        return f"{culprit.report.text}{_during(culprit)}; it was the last to begin that"
    seen = "it has said nothing since it was started"
    if culprit.note is not None:
        seconds = unix_seconds - culprit.note.unix_seconds
        seen = f"last heard of {seconds:.1f} s ago in {culprit.note}"
    limit = f"train.collective_timeout_seconds={timeout_seconds:g}"
    return f"did not come to meet {met} within {limit}; {seen}"


def _during(state: RankState) -> str:
    return f", in {state.note}" if state.note else ""


def _others(culprit: RankState, states: Sequence[RankState]) -> list[str]:
    """Where the others were, those in the same place on one line."""
    places = dict[str, list[int]]()
    for state in states:
        if state is not culprit:
            where = str(state.note) if state.note else "not started"
            if state.report and state.report.kind == "collective":
                where += f", waiting in {state.report.collective or 'a collective'}"
            elif state.report:
                where += f": {state.report.text}"
            elif state.ended:
                where += f": {state.ended}"
            places.setdefault(where, []).append(state.index)
    return [f"  {format_ranks(ranks)}: {where}" for where, ranks in places.items()]
