"""Running ahead: in order, bounded, errors in their turn, and no thread left."""

from __future__ import annotations

import threading
import time

import pytest

from herder.data.prefetch import prefetch


def prefetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch") and t.is_alive()]


def test_batches_come_in_order_and_the_thread_ends() -> None:
    assert list(prefetch(lambda step: step * step, range(5))) == [0, 1, 4, 9, 16]
    assert prefetch_threads() == []


def test_no_more_than_asked_is_made_ahead() -> None:
    made: list[int] = []
    batches = prefetch(lambda step: made.append(step) or step, range(100))
    assert next(batches) == 0
    time.sleep(0.05)
    assert made == [0, 1, 2]
    batches.close()


def test_an_error_comes_when_its_step_is_due_and_ends_the_thread() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError(f"step {step} is bad")
        return step

    batches = prefetch(make, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 is bad"):
        next(batches)
    assert prefetch_threads() == []


def test_closing_early_ends_the_thread() -> None:
    batches = prefetch(lambda step: step, range(1000))
    next(batches)
    batches.close()
    assert prefetch_threads() == []
