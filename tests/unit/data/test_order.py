"""The order of rows is arithmetic on (seed, step)."""

from __future__ import annotations

import numpy as np
import pytest

from herder.data.order import epoch_order, step_rows


def test_an_epoch_reads_every_row_once() -> None:
    steps = [step_rows(step, rows_per_step=6, num_rows=60, seed=3) for step in range(10)]
    rows = np.concatenate(steps)
    assert sorted(rows.tolist()) == list(range(60))


def test_a_step_may_span_the_end_of_an_epoch() -> None:
    steps = [step_rows(step, rows_per_step=4, num_rows=10, seed=0) for step in range(5)]
    rows = np.concatenate(steps)
    assert sorted(rows[:10].tolist()) == list(range(10))
    assert sorted(rows[10:].tolist()) == list(range(10))


def test_a_corpus_smaller_than_a_step_is_read_several_times_in_it() -> None:
    rows = step_rows(0, rows_per_step=7, num_rows=3, seed=0)
    assert np.bincount(rows).tolist() in ([2, 2, 3], [2, 3, 2], [3, 2, 2])


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (2**63, 0), (1, 1)])
def test_each_seed_and_epoch_has_an_order_of_its_own(seed: int, epoch: int) -> None:
    first = epoch_order(1000, seed=0, epoch=0)
    other = epoch_order(1000, seed=seed, epoch=epoch)
    assert (first == other).sum() < 10


def mixed(state: int) -> int:
    """SplitMix64's finalizer on Python's own integers."""
    word = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
    return state ^ (state >> 31)


def test_the_order_is_that_of_the_written_formula() -> None:
    gamma = 0x9E3779B97F4A7C15
    stream = mixed(mixed(7 + gamma) ^ 3)
    keys = [mixed(((row + 1) * gamma + stream) % 2**64) for row in range(50)]
    assert epoch_order(50, seed=7, epoch=3).tolist() == sorted(range(50), key=keys.__getitem__)


def test_the_order_never_changes_between_versions() -> None:
    assert epoch_order(8, seed=1, epoch=0).tolist() == [5, 4, 7, 1, 0, 2, 6, 3]


def test_neighbours_in_the_corpus_are_not_neighbours_in_the_order() -> None:
    order = epoch_order(10_000, seed=5, epoch=2)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
