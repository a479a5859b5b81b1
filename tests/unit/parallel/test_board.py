"""What ranks leave on the board is there for who maps the same memory, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from herder.observe.trace import Note, Report
from herder.parallel.board import Board


@pytest.fixture
def boards() -> Iterator[tuple[Board, Board]]:
    """The launcher's, and a rank's."""
    ours = Board.create(3)
    theirs = Board(os.dup(ours.descriptor), 3)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_the_newest_note_of_each_rank_is_seen_by_others(boards: tuple[Board, Board]) -> None:
    ours, theirs = boards
    theirs.note(1, Note(5.25, None, "starting"))
    theirs.note(2, Note(7.5, 12, "gradient reduction"))
    theirs.note(1, Note(8.0, 12, "backward"))
    assert [ours.last_note(rank) for rank in range(3)] == [
        None,
        Note(8.0, 12, "backward"),
        Note(7.5, 12, "gradient reduction"),
    ]
    assert str(ours.last_note(2)) == "step 12, gradient reduction"


def test_a_report_that_is_too_long_loses_its_end_and_touches_no_other(
    boards: tuple[Board, Board],
) -> None:
    ours, theirs = boards
    theirs.note(2, Note(1.0, 3, "backward"))
    theirs.report(1, Report(2.0, "bug", 1, "", "ValueError: " + "ä" * 10_000))
    read = ours.last_report(1)
    assert read is not None
    assert read.text.startswith("ValueError: ää")
    assert 3_000 < len(read.text) < 10_000
    assert ours.last_note(2) == Note(1.0, 3, "backward")
    assert ours.last_report(2) is None
