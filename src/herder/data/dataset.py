"""Training batches: the packed rows of a corpus, read in the order of (seed, step).

Owns how rows are grouped into micro-batches and micro-batches shared between data-parallel ranks. A
step's rows do not depend on either: grouping only says which of them are computed together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from herder.data.batch import MicroBatch
from herder.data.order import step_rows
from herder.data.packing import PackedRows
from herder.errors import ConfigError, DataError


class TokenDataset:
    """An endless, resumable source of optimizer steps."""

    def __init__(
        self, rows: PackedRows, *, micro_batch_size: int, global_batch_tokens: int, seed: int
    ) -> None:
        """Raises ConfigError where global_batch_tokens is no multiple of a micro-batch's tokens."""
        if rows.num_rows < 1:
            raise DataError("The corpus is empty: there is no row to read.")
        micro_tokens = micro_batch_size * rows.sequence_length
        if global_batch_tokens % micro_tokens:
            nearest = max(round(global_batch_tokens / micro_tokens), 1) * micro_tokens
            raise ConfigError(
                f"train.global_batch_tokens={global_batch_tokens} is not a multiple of "
                f"micro_batch_size x sequence_length = {micro_batch_size} x {rows.sequence_length} "
                f"= {micro_tokens}. The nearest that is: {nearest}."
            )
        self.packed = rows
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = global_batch_tokens // micro_tokens
        self.seed = seed

    def micro_batches(
        self, step: int, *, shard_index: int = 0, num_shards: int = 1
    ) -> list[MicroBatch]:
        """The micro-batches of optimizer step `step` (from 0), or one rank's share of them.

        A pure function of (seed, step). Shard i of n has micro-batches i, i + n, i + 2n, ...; all
        shards have as many, since ranks meet in each: the last ones of a step that n does not
        divide are empty.
        """
        rows = self.rows(step)
        micro_tokens = self.micro_batch_size * self.packed.sequence_length
        own = range(shard_index, -(-self.num_micro_batches // num_shards) * num_shards, num_shards)
        batches = []
        for index in own:
            batch = self.packed.micro_batch(rows[min(index, len(rows) - 1)])
            batch = replace(batch, first_token=index * micro_tokens)
            batches.append(batch if index < len(rows) else batch.emptied())
        return batches

    def rows(self, step: int) -> NDArray[np.int64]:
        """[micro-batches, micro_batch_size]: which packed rows step `step` reads."""
        rows = step_rows(
            step,
            rows_per_step=self.num_micro_batches * self.micro_batch_size,
            num_rows=self.packed.num_rows,
            seed=self.seed,
        )
        return rows.reshape(self.num_micro_batches, self.micro_batch_size)
