"""Batches made in the background, so that the model waits for none.

One thread is enough: a batch is a few gathers from a memory-mapped file. Owns the queue only; what
a batch is depends on its step alone, so running ahead can change nothing, and a run that stops has
read nothing that a resumed one would miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Batch = TypeVar("Batch")


def prefetch(
    make: Callable[[int], Batch], steps: Iterable[int], *, num_ahead: int = 2
) -> Generator[Batch]:
    """`make(step)` for each step in order, at most `num_ahead` made before they are asked for.

    An error of `make` is raised when its step's turn comes. Closing the generator ends the thread.
    """
    remaining = iter(steps)
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as pool:
        try:
            pending.extend(pool.submit(make, step) for step in islice(remaining, num_ahead))
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(make, step) for step in islice(remaining, 1))
                yield batch
        finally:
            for future in pending:
                future.cancel()
