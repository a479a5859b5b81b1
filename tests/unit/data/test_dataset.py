"""Grouping of rows into micro-batches, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from herder.data.dataset import TokenDataset
from herder.data.packing import PackedRows
from herder.errors import ConfigError, DataError


def packed_rows() -> PackedRows:
    lengths = np.random.default_rng(0).integers(2, 40, size=200)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    return PackedRows(tokens, offsets, sequence_length=16)


def test_a_step_holds_global_batch_tokens_in_micro_batches_of_exactly_t_tokens() -> None:
    dataset = TokenDataset(packed_rows(), micro_batch_size=2, global_batch_tokens=128, seed=0)
    batches = dataset.micro_batches(7)
    assert [batch.num_tokens for batch in batches] == [32] * 4


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_token_has_the_same_number_however_its_step_is_cut(micro_batch_size: int) -> None:
    dataset = TokenDataset(
        packed_rows(), micro_batch_size=micro_batch_size, global_batch_tokens=64, seed=0
    )
    numbered = {
        batch.first_token + index: token
        for batch in dataset.micro_batches(3)
        for index, token in enumerate(batch.tokens_T.tolist())
    }
    whole = TokenDataset(packed_rows(), micro_batch_size=4, global_batch_tokens=64, seed=0)
    assert numbered == dict(enumerate(whole.micro_batches(3)[0].tokens_T.tolist()))


def test_a_ranks_micro_batches_are_numbered_as_those_of_the_whole_step() -> None:
    dataset = TokenDataset(packed_rows(), micro_batch_size=1, global_batch_tokens=64, seed=0)
    share = dataset.micro_batches(0, shard_index=1, num_shards=2)
    assert [batch.first_token for batch in share] == [16, 48]


def test_a_global_batch_that_is_no_multiple_is_refused_with_the_nearest_that_is() -> None:
    with pytest.raises(ConfigError, match=r"2 x 16 = 32. The nearest that is: 96"):
        TokenDataset(packed_rows(), micro_batch_size=2, global_batch_tokens=100, seed=0)


def test_ranks_that_do_not_divide_the_micro_batches_have_as_many_of_which_the_last_are_empty() -> (
    None
):
    dataset = TokenDataset(packed_rows(), micro_batch_size=2, global_batch_tokens=128, seed=0)
    shares = [dataset.micro_batches(5, shard_index=rank, num_shards=3) for rank in range(3)]
    assert [[batch.num_real_tokens > 0 for batch in share] for share in shares] == [
        [True, True],
        [True, False],
        [True, False],
    ]
    read = {batch.first_token: batch for share in shares for batch in share}
    whole = dataset.micro_batches(5)
    assert len(read) == 6
    for batch in whole:
        assert batch.tokens_T.equal(read[batch.first_token].tokens_T)
    losses = sum(batch.num_loss_tokens for batch in read.values())
    assert losses == sum(batch.num_loss_tokens for batch in whole)


def test_an_empty_corpus_is_refused() -> None:
    empty = PackedRows(np.zeros(0, np.uint16), np.zeros(1, np.int64), sequence_length=16)
    with pytest.raises(DataError, match="empty"):
        TokenDataset(empty, micro_batch_size=1, global_batch_tokens=16, seed=0)
