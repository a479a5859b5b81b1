"""Batches made in the background, so that the model waits for none.

One thread is enough: a batch is a few gathers from a memory-mapped file. Owns the queue only; what
a batch is depends on its step alone, so running ahead can change nothing, and a run that stops has
read nothing that a resumed one would miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")
_NUM_AHEAD = 2


def prefetch(make: Callable[[int], Batch], steps: Iterable[int]) -> Generator[Batch]:
    """`make(step)` for each step in order, two made before they are asked for.

    An error of `make` is raised when its step's turn comes. Closing the generator ends the thread.
    """
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as pool:
        for step in steps:
            pending.append(pool.submit(make, step))
            if len(pending) > _NUM_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
