"""Whose fault a hang was, from traces written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from herder.observe.hangs import Diagnosis, diagnose_hang
from herder.observe.trace import Call, Kind, Note, Report, Trace

GROUPS = {"tp": ([0, 1], [2, 3]), "dp": ([0, 2], [1, 3])}
"""Of four ranks: two copies of the model, each split over two."""
AXES = {"t": "tp", "d": "dp"}
FAILED = ("collective", "all_reduce failed (Timed out waiting 8000ms)")
DONE = ("done", "")


def call(rank: int, axis: str, sequence: int, unix_seconds: float, **changes: Any) -> Call:
    """By default an all_reduce of 4 x 8 in the group of this rank."""
    group = next(str(ranks) for ranks in GROUPS[axis] if rank in ranks)
    fields = {"step": 7, "name": "all_reduce", "shapes": [[4, 8]], "group": axis + group}
    return Call(axis=axis, sequence=sequence, unix_seconds=unix_seconds, **{**fields, **changes})


def trace(
    rank: int,
    letters: str,
    ended: tuple[Kind, str] | None = None,
    *,
    delay: float = 0.0,
) -> tuple[int, Trace]:
    """A rank that entered these, a second each: `t` in its tp group, `d` in its dp group."""
    calls = [
        call(rank, AXES[letter], letters[: place + 1].count(letter), 100.0 + place + delay)
        for place, letter in enumerate(letters)
    ]
    return rank, Trace(
        place=f"dp {rank // 2}, tp {rank % 2}",
        groups={
            axis + str(ranks): ranks for axis in GROUPS for ranks in GROUPS[axis] if rank in ranks
        },
        calls=calls,
        note=Note(99.0, 7, "forward and backward"),
        ending=Report(200.0 - rank, ended[0], 1, "all_reduce", ended[1]) if ended else None,
    )


def diagnosed(*traces: tuple[int, Trace]) -> Diagnosis:
    return diagnose_hang(dict(sorted(traces, key=lambda each: each[0])))


def where(diagnosis: Diagnosis) -> Mapping[int, tuple[str, int, list[int]]]:
    """Axis and number of the call each rank is in, and whom it waits for."""
    return {
        s.rank: (s.call.axis, s.call.sequence, s.waits_for) for s in diagnosis.standings if s.call
    }


def test_a_rank_that_is_behind_is_named_with_the_call_that_its_peers_wait_in() -> None:
    found = diagnosed(trace(0, "tdt"), trace(1, "td"), trace(2, "tdt"), trace(3, "t"))
    assert (found.cause, found.ranks) == ("behind", [3])
    assert found.call is not None
    assert (found.call.name, found.call.axis, found.call.sequence) == ("all_reduce", "dp", 1)
    assert (found.call.shapes, found.call.step) == ([[4, 8]], 7)
    # Rank 0 waits for one that waits itself.
    assert where(found) == {
        0: ("tp", 2, [1]),
        1: ("dp", 1, [3]),
        2: ("tp", 2, [3]),
        3: ("tp", 1, []),
    }
    assert found.verdict.startswith(
        "rank 3 (dp 1, tp 1) is behind, in step 7, forward and backward: rank 1 waits in "
        "all_reduce [4,8], number 1 on axis dp, step 7."
    )
    assert "No rank has said how it ended" in found.verdict


def test_one_that_says_nothing_while_its_peers_complain_hangs_or_was_killed() -> None:
    found = diagnosed(
        trace(0, "tdt", FAILED), trace(1, "td", FAILED), trace(2, "tdt", FAILED), trace(3, "t")
    )
    assert (found.cause, found.ranks) == ("silent", [3])
    assert "rank 1 waits in all_reduce [4,8], number 1 on axis dp" in found.verdict
    assert "No rank has said" not in found.verdict


def test_one_that_stopped_within_a_collective_is_named_with_it() -> None:
    equal = [trace(rank, "tdtd", FAILED) for rank in (0, 1, 3)]
    found = diagnosed(*equal, trace(2, "tdtd"))
    assert (found.cause, found.ranks) == ("silent", [2])
    assert "the last that it entered is all_reduce [4,8], number 2 on axis dp" in found.verdict


def test_one_that_was_killed_ahead_of_its_peers_is_not_taken_for_one_that_waits() -> None:
    found = diagnosed(*(trace(rank, "td", FAILED) for rank in (0, 2, 3)), trace(1, "tdt"))
    assert (found.cause, found.ranks) == ("silent", [1])


def test_a_rank_that_left_no_trace_is_behind_all_others() -> None:
    found = diagnosed(trace(0, "t"), (1, Trace()), trace(2, "td"), trace(3, "td"))
    assert (found.cause, found.ranks) == ("behind", [1])
    assert found.verdict.startswith("rank 1 is behind: rank 0 waits in all_reduce [4,8]")
    assert "  rank 1: no trace; did not say how it ended" in found.lines()


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"name": "broadcast"}, "broadcast [4,8]"), ({"shapes": [[4, 9]]}, "all_reduce [4,9]")],
)
def test_another_collective_under_the_same_number_is_the_cause(
    changes: dict[str, Any], told: str
) -> None:
    odd = trace(3, "td", FAILED)
    odd[1].calls[1] = replace(odd[1].calls[1], **changes)
    found = diagnosed(*(trace(rank, "td", FAILED) for rank in (0, 1, 2)), odd)
    assert (found.cause, found.ranks) == ("mismatch", [1, 3]), "of two, nobody knows which"
    assert f"rank 3: {told}, number 1 on axis dp, step 7" in found.verdict
    assert "rank 1: all_reduce [4,8], number 1 on axis dp, step 7" in found.verdict


def test_of_three_that_differ_the_one_that_is_alone_is_named() -> None:
    traces = [
        Trace(groups={"w": [0, 1, 2]}, calls=[call(0, "dp", 1, 100.0, group="w", name=name)])
        for name in ("all_reduce", "barrier", "all_reduce")
    ]
    found = diagnosed(*enumerate(traces))
    assert (found.cause, found.ranks) == ("mismatch", [1])


def test_ranks_of_an_exchange_may_have_other_shapes() -> None:
    traces = [trace(rank, "td") for rank in range(4)]
    for rank, each in traces:
        exchange = {"name": "all_to_all_single", "shapes": [[rank, 8], [4, 8]]}
        each.calls[0] = replace(each.calls[0], **exchange)
    assert diagnosed(*traces).cause == "none"


def test_an_error_of_its_own_is_the_cause_of_what_others_say() -> None:
    found = diagnosed(
        trace(0, "td", FAILED),
        trace(1, "td", ("bug", "KeyError: 'x'")),  # ended after rank 2
        trace(2, "t", ("bug", "ValueError: boom")),
        trace(3, "tdt"),
    )
    assert (found.cause, found.ranks) == ("error", [2])
    assert found.verdict == "rank 2 (dp 1, tp 0) ended by itself: ValueError: boom"


def test_ranks_that_wait_for_one_another_are_a_deadlock() -> None:
    found = diagnosed(trace(0, "t"), trace(1, "d"), trace(2, "d"), trace(3, "t"))
    assert (found.cause, found.ranks) == ("deadlock", [0, 1, 2, 3])
    assert "rank 0 for rank 1 in all_reduce [4,8], number 1 on axis tp" in found.verdict
    assert "rank 2 for rank 0 in all_reduce [4,8], number 1 on axis dp" in found.verdict


def test_one_that_came_when_others_had_given_up_is_late() -> None:
    punctual = [trace(rank, "td", FAILED) for rank in (0, 1, 3)]
    found = diagnosed(*punctual, trace(2, "td", FAILED, delay=30.0))
    assert (found.cause, found.ranks) == ("late", [2])
    assert "came 30.0 s after the first rank to all_reduce [4,8], number 1 on axis dp" in (
        found.verdict
    )


def test_nothing_is_wrong_where_all_are_equal_or_have_ended() -> None:
    running = diagnosed(*(trace(rank, "tdtd") for rank in range(4)))
    assert (running.cause, running.ranks, running.call) == ("none", [], None)
    ended = diagnosed(*(trace(rank, "tdtd", DONE) for rank in range(4)))
    assert (ended.cause, ended.verdict) == ("none", "All ranks ended when all was done.")
    assert len(ended.lines()) == 2, "ranks in the same place are on one line"
    assert ended.lines()[1].startswith("  ranks 0-3: step 7, forward and backward; last entered")


def transfer(name: str, peer: int, sequence: int, *, rows: int = 8) -> Call:
    changes = {"name": name, "peer": peer, "group": "pp", "shapes": [[rows, 4]]}
    return call(0, "dp", sequence, 100.0 + sequence, **changes)


def pipeline(*, num_sent: int, rows: int = 8) -> Diagnosis:
    """Rank 0 has sent some hidden states, of which rank 1 waits for the third."""
    sends = [transfer("send", 1, number, rows=rows) for number in range(1, num_sent + 1)]
    receives = [transfer("recv", 0, number) for number in (1, 2, 3)]
    groups = {"pp": [0, 1]}
    traces = [Trace(groups=groups, calls=calls) for calls in (sends, receives)]
    return diagnosed(*enumerate(traces))


def test_a_rank_that_does_not_send_is_behind_the_one_that_receives() -> None:
    found = pipeline(num_sent=2)
    assert (found.cause, found.ranks) == ("behind", [0])
    assert "rank 1 waits in recv from 0 [8,4], number 3" in found.verdict
    assert pipeline(num_sent=3).cause == "none"


def test_what_is_sent_has_to_be_what_is_received() -> None:
    found = pipeline(num_sent=3, rows=9)
    assert (found.cause, found.ranks) == ("mismatch", [0, 1])
    assert "rank 0: send to 1 [9,4], number 1" in found.verdict


def test_lines_that_are_no_longer_kept_are_not_missed() -> None:
    ahead, behind = trace(0, "t" * 6), trace(1, "tt")
    ahead[1].calls = ahead[1].calls[4:]
    found = diagnosed(ahead, behind, trace(2, ""), trace(3, ""))
    assert (found.cause, found.ranks) == ("behind", [1])
    assert where(found)[0] == ("tp", 5, [1])


def test_addresses_do_not_keep_ranks_apart() -> None:
    message = "all_reduce failed (Read error [127.0.0.1]:{}: reset)"
    peers = [trace(rank, "td", ("collective", message.format(rank))) for rank in (0, 1, 3)]
    told = diagnosed(*peers, trace(2, "td")).lines()
    assert told[1].startswith("  ranks 0-1, 3: ")
    assert told[1].endswith("; all_reduce failed (Read error: reset)")


def test_two_in_one_collective_are_both_named_before_one_of_them_complains() -> None:
    """Rank 3 stopped within it; rank 2 waits there, and its own peer does not get further."""
    standing = [trace(0, "td"), trace(1, "td"), trace(2, "t"), trace(3, "t")]
    found = diagnosed(*standing)
    assert (found.cause, found.ranks) == ("behind", [2, 3])
    assert found.verdict.startswith("ranks 2-3 are behind, in step 7, forward and backward: ")
    complained = [trace(0, "td", FAILED), trace(1, "td", FAILED), trace(2, "t", FAILED)]
    found = diagnosed(*complained, trace(3, "t"))
    assert (found.cause, found.ranks) == ("silent", [3])
