"""Law: the batch at step t is a pure function of (seed, t), never of the world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herder.data.batch import MicroBatch
from herder.data.dataset import TokenDataset
from herder.data.order import step_rows
from herder.data.packing import PackedRows
from herder.data.prefetch import prefetch


def dataset(*, micro_batch_size: int = 1, seed: int = 11) -> TokenDataset:
    """A corpus of 300 documents, the last step of whose first epoch reaches into the second."""
    lengths = np.random.default_rng(1).integers(2, 90, size=300)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    rows = PackedRows(tokens, offsets, sequence_length=32)
    return TokenDataset(
        rows, micro_batch_size=micro_batch_size, global_batch_tokens=8 * 32, seed=seed
    )


def contents(batches: list[MicroBatch]) -> list[tuple[list[int], ...]]:
    fields = ("tokens_T", "positions_T", "targets_T", "weights_T")
    return [tuple(getattr(batch, field).tolist() for field in fields) for batch in batches]


@pytest.mark.parametrize("step", [0, 1, 60, 1000])
def test_a_fresh_dataset_gives_the_same_step_whatever_was_read_before(step: int) -> None:
    used = dataset()
    for earlier in (5, 999, 2):
        used.micro_batches(earlier)
    assert contents(used.micro_batches(step)) == contents(dataset().micro_batches(step))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [0, 61])
def test_ranks_of_any_world_size_share_the_same_micro_batches(num_ranks: int, step: int) -> None:
    whole = contents(dataset().micro_batches(step))
    shares = [
        contents(dataset().micro_batches(step, shard_index=rank, num_shards=num_ranks))
        for rank in range(num_ranks)
    ]
    assert {len(share) for share in shares} == {8 // num_ranks}
    assert [shares[index % num_ranks][index // num_ranks] for index in range(8)] == whole


@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
def test_micro_batch_size_groups_the_same_rows_of_a_step(micro_batch_size: int) -> None:
    for step in (0, 61):
        ones = dataset().micro_batches(step)
        groups = dataset(micro_batch_size=micro_batch_size).micro_batches(step)
        joined = [torch.cat([batch.tokens_T for batch in batches]) for batches in (ones, groups)]
        assert torch.equal(*joined)
        lengths = [sum((b.document_lengths for b in batches), ()) for batches in (ones, groups)]
        assert lengths[0] == lengths[1]


def test_prefetching_changes_no_batch() -> None:
    ahead = prefetch(dataset().micro_batches, range(3, 9))
    assert [contents(batches) for batches in ahead] == [
        contents(dataset().micro_batches(step)) for step in range(3, 9)
    ]


def test_another_seed_gives_another_order() -> None:
    assert contents(dataset(seed=1).micro_batches(0)) != contents(dataset(seed=2).micro_batches(0))


def test_every_epoch_reads_every_prediction_once_and_in_an_order_of_its_own() -> None:
    data = dataset()
    rows = data.packed.num_rows
    orders = []
    order = {"rows_per_step": data.num_micro_batches, "num_rows": rows, "seed": data.seed}
    read = [row for step in range(rows) for row in step_rows(step, **order).tolist()]
    for epoch in range(2):
        part = read[epoch * rows : (epoch + 1) * rows]
        assert sorted(part) == list(range(rows))
        orders.append(part)
    assert orders[0] != orders[1]
