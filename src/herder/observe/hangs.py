"""Whose fault a hang was: from the traces that ranks left, the one that is behind, and where.

All ranks of a group enter the same collectives in the same order, so that each has the same number
on all of them: of a rank that does not come, the last number stays behind its peers'. Whoever is
waited for and waits for nobody is the cause; the others wait for it, or for those who do. Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from herder.observe.trace import Call, Note, Report, Trace
from herder.units import format_ranks, format_seconds

Cause = Literal["mismatch", "error", "silent", "behind", "deadlock", "late", "none"]
"""mismatch: other collectives than peers' under one number; error: of its own; silent: others say
how they ended and it does not; behind: waited for; deadlock: each waits for another; late: it came
when others had given up."""
_Stream = tuple[str, ...]
"""What is counted: (group,), or (group, source, target) of transfers."""
_Entered = Mapping[_Stream, Mapping[int, Mapping[int, Call]]]
"""By stream, rank (all that it has) and number."""
_Wait = tuple[Call, list[int]]
"""A call, and the ranks that have not entered it."""
_Found = tuple[Cause, list[int], Call | None, str]
_UNEVEN = ("all_to_all", "all_to_all_single", "gather", "scatter")
"""Collectives whose ranks may have tensors of other shapes."""


@dataclass(frozen=True)
class Standing:
    """Where one rank was last."""

    rank: int
    place: str
    note: Note | None
    call: Call | None
    """Which it waits in, or else the last that it entered."""
    waits_for: list[int]
    """Ranks that have not entered it."""
    ending: Report | None

    def __str__(self) -> str:
        told = [str(self.note)] if self.note else []
        if self.call is not None:
            told.append(f"{'waits in' if self.waits_for else 'last entered'} {self.call}")
        if self.ending is None:
            return "; ".join([*(told or ["no trace"]), "did not say how it ended"])
        message = re.sub(r" \[[^ ]*\]:\d+", "", self.ending.text)  # addresses, other ones each
        return "; ".join([*told, message or "done"])


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with a run's collectives, as far as traces tell."""

    cause: Cause
    ranks: list[int]
    """At fault; empty where nothing is wrong."""
    call: Call | None
    """What they did not come to, or did not come out of."""
    verdict: str
    standings: list[Standing]

    def lines(self) -> list[str]:
        """The verdict, then where each rank was, those in the same place on one line."""
        alike = defaultdict[str, list[int]](list)
        for standing in self.standings:
            alike[str(standing)].append(standing.rank)
        return [self.verdict, *(f"  {format_ranks(r)}: {told}" for told, r in alike.items())]


def diagnose_hang(traces: Mapping[int, Trace]) -> Diagnosis:
    """The ranks at fault; of a run that goes on, who is behind now. traces: of all ranks."""
    entered = _entered(traces)
    waits = _waits(entered)
    cause, ranks, call, verdict = _found(traces, entered, waits)
    if not any(trace.ending for trace in traces.values()):
        verdict += " No rank has said how it ended: they go on, hang, or were killed all at once."
    standings = list[Standing]()
    for rank, trace in traces.items():
        at, awaited = waits.get(rank, (trace.calls[-1] if trace.calls else None, []))
        standings.append(Standing(rank, trace.place, trace.note, at, awaited, trace.ending))
    return Diagnosis(cause=cause, ranks=ranks, call=call, verdict=verdict, standings=standings)


def _entered(traces: Mapping[int, Trace]) -> _Entered:
    entered = dict[_Stream, dict[int, dict[int, Call]]]()
    for rank, trace in traces.items():
        for call in trace.calls:
            stream, ranks = (call.group,), trace.groups.get(call.group, [rank])
            if call.peer is not None:
                ranks = [rank, call.peer] if call.name == "send" else [call.peer, rank]
                stream = (call.group, *map(str, ranks))
            of_ranks = entered.setdefault(stream, {each: {} for each in ranks})
            of_ranks.setdefault(rank, {})[call.sequence] = call
    return entered


def _waits(entered: _Entered) -> dict[int, _Wait]:
    """Of each rank that is ahead of others of its group: its newest call that they lack."""
    waits = dict[int, _Wait]()
    for calls in entered.values():
        last = {rank: max(own, default=0) for rank, own in calls.items()}
        first = min(last.values()) + 1  # that somebody has not entered
        for rank, own in calls.items():
            if last[rank] >= first:
                call = own[min(number for number in own if number >= first)]
                if rank not in waits or call.unix_seconds > waits[rank][0].unix_seconds:
                    waits[rank] = call, [r for r, number in last.items() if number < call.sequence]
    return waits


def _found(traces: Mapping[int, Trace], entered: _Entered, waits: Mapping[int, _Wait]) -> _Found:
    endings = {rank: trace.ending for rank, trace in traces.items() if trace.ending}
    silent = set(traces) - set(endings)
    if not silent and all(ending.kind == "done" for ending in endings.values()):
        return "none", [], None, "All ranks ended when all was done."
    if (mismatch := _mismatch(entered)) is not None:
        return mismatch
    own = {rank: each for rank, each in endings.items() if each.kind in ("told", "bug")}
    if own:
        first = min(own.values(), key=lambda ending: ending.unix_seconds)
        ranks = [rank for rank, ending in own.items() if ending.text == first.text]
        return "error", ranks, None, f"{_who(ranks, traces)} ended by itself: {first.text}"
    if endings and silent:
        ranks = sorted(silent - set(waits) or silent)
        return "silent", *_absence(ranks, "hung or gone without a word", traces, waits)
    behind = {rank for _, ranks in waits.values() for rank in ranks} - set(waits)
    if behind:
        return "behind", *_absence(sorted(behind), "behind", traces, waits)
    if waits:
        told = [f"rank {rank} for {format_ranks(w[1])} in {w[0]}" for rank, w in waits.items()]
        return "deadlock", sorted(waits), None, f"Ranks wait for one another: {'; '.join(told)}."
    calls = {rank: trace.calls[-1] for rank, trace in traces.items() if trace.calls}
    if not endings or not calls:
        return "none", [], None, "No rank is behind: all have entered the same collectives."
    late = max(calls, key=lambda rank: calls[rank].unix_seconds)
    seconds = calls[late].unix_seconds - min(call.unix_seconds for call in calls.values())
    told = f"came {format_seconds(seconds)} after the first rank to {calls[late]}"
    return "late", [late], calls[late], f"{_who([late], traces)} {told}, and all gave up there."


def _absence(
    ranks: list[int], what: str, traces: Mapping[int, Trace], waits: Mapping[int, _Wait]
) -> tuple[list[int], Call | None, str]:
    """(ranks, what they did not come to, verdict)."""
    first = traces[ranks[0]]
    told = f"{_who(ranks, traces)} {'is' if len(ranks) == 1 else 'are'} {what}"
    told += f", in {first.note}" if first.note else ""
    met = {rank: wait[0] for rank, wait in waits.items() if set(wait[1]) & set(ranks)}
    call = min(met.values(), key=lambda call: call.unix_seconds, default=None)
    if call is not None:
        peers = [r for r, c in met.items() if (c.group, c.sequence) == (call.group, call.sequence)]
        waiting = f"{format_ranks(peers)} {'waits' if len(peers) == 1 else 'wait'}"
        told += f": {waiting} in {call}"
    elif first.calls:
        call, told = first.calls[-1], f"{told}: the last that it entered is {first.calls[-1]}"
    return ranks, call, f"{told}."


def _mismatch(entered: _Entered) -> _Found | None:
    """The first number under which ranks entered different calls; the ranks in the minority."""
    met = defaultdict[tuple[_Stream, int], dict[int, Call]](dict)
    for stream, calls in entered.items():
        for rank, own in calls.items():
            for number, call in own.items():
                met[stream, number][rank] = call
    differing = [m for m in met.values() if len(set(map(_signature, m.values()))) > 1]
    if not differing:
        return None
    calls = min(differing, key=lambda m: min(call.unix_seconds for call in m.values()))
    alike = defaultdict[str, list[int]](list)
    for rank, call in calls.items():
        alike[_signature(call)].append(rank)
    most = max(map(len, alike.values()))
    odd = [ranks for ranks in alike.values() if len(ranks) < most] or list(alike.values())
    ranks = sorted(chain(*odd))
    told = "; ".join(f"{format_ranks(each)}: {calls[each[0]]}" for each in alike.values())
    return "mismatch", ranks, calls[ranks[0]], f"Ranks entered different collectives: {told}."


def _signature(call: Call) -> str:
    """What has to be alike."""
    shapes = "" if call.name in _UNEVEN else str(call.shapes)
    return shapes if call.peer is not None else f"{call.name}{shapes}"


def _who(ranks: list[int], traces: Mapping[int, Trace]) -> str:
    place = traces[ranks[0]].place if len(ranks) == 1 else ""
    return format_ranks(ranks) + (f" ({place})" if place else "")
