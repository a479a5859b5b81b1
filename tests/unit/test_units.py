"""Quantities as text."""

from herder.units import format_ranks


def test_ranks_are_told_in_runs() -> None:
    assert format_ranks([4]) == "rank 4"
    assert format_ranks([0, 2, 3, 4, 9]) == "ranks 0, 2-4, 9"
