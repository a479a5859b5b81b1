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


def test_ranks_that_do_not_divide_the_micro_batches_are_refused() -> None:
    dataset = TokenDataset(packed_rows(), micro_batch_size=2, global_batch_tokens=128, seed=0)
    with pytest.raises(ConfigError, match="3 data-parallel ranks do not divide the 4"):
        dataset.micro_batches(0, shard_index=0, num_shards=3)


def test_an_empty_corpus_is_refused() -> None:
    empty = PackedRows(np.zeros(0, np.uint16), np.zeros(1, np.int64), sequence_length=16)
    with pytest.raises(DataError, match="empty"):
        TokenDataset(empty, micro_batch_size=1, global_batch_tokens=16, seed=0)
