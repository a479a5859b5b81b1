"""Which rows of a packed corpus make up optimizer step t: arithmetic on (seed, step) alone.

Owns the order, and with it resuming: a run that goes on at step t needs that one number. It knows
nothing of tokens, files, ranks or world sizes, so no change of hardware can change what is read.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: 64 well-mixed bits for each distinct input.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014, figure 13.
    """
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `range(num_rows)`: the order in which `epoch` reads the rows.

    Rows are sorted by a hash of (seed, epoch, row). This is written out here, and not left to a
    library's shuffle, because a run must resume to the same data under another numpy version.
    Two epochs are kept, since a step may span the end of one.
    """
    start = np.array([seed & _WORD, epoch & _WORD], dtype=np.uint64)
    stream = _mix(_mix(start[:1] + np.uint64(_GOLDEN_GAMMA)) ^ start[1:])
    counter = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
    order = np.argsort(_mix(counter + stream), kind="stable")
    order.setflags(write=False)
    return order


def step_rows(step: int, *, rows_per_step: int, num_rows: int, seed: int) -> NDArray[np.int64]:
    """Indices of the rows that step `step` (from 0) trains on, epoch after epoch.

    A pure function of (seed, step). Within an epoch every row comes exactly once.
    """
    first = step * rows_per_step
    epochs, places = np.divmod(np.arange(first, first + rows_per_step), num_rows)
    rows = np.empty(rows_per_step, dtype=np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        rows[inside] = epoch_order(num_rows, seed=seed, epoch=int(epoch))[places[inside]]
    return rows
