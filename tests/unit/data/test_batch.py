"""The micro-batch record refuses what cannot be one."""

from __future__ import annotations

import pytest
import torch

from herder.data.batch import MicroBatch


def micro_batch(document_lengths: tuple[int, ...], *, num_tokens: int = 6) -> MicroBatch:
    tokens_T = torch.arange(num_tokens)
    return MicroBatch(
        tokens_T=tokens_T,
        positions_T=tokens_T,
        targets_T=tokens_T,
        weights_T=torch.tensor([1.0] * (num_tokens - 2) + [0.0, 0.5]),
        real_T=torch.arange(num_tokens) < num_tokens - 1,
        document_lengths=document_lengths,
    )


def test_a_micro_batch_counts_its_tokens_and_its_weights() -> None:
    batch = micro_batch((4, 2))
    assert batch.num_tokens == 6
    assert batch.num_loss_tokens == 4.5
    assert batch.num_real_tokens == 5


def test_document_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(AssertionError, match="documents hold 5 tokens"):
        micro_batch((4, 1))


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(AssertionError, match="an empty document"):
        micro_batch((6, 0))


def test_moving_to_a_device_keeps_every_field() -> None:
    batch = micro_batch((4, 2))
    moved = batch.to("cpu")
    assert moved.document_lengths == batch.document_lengths
    assert torch.equal(moved.weights_T, batch.weights_T)
    assert torch.equal(moved.real_T, batch.real_T)


def test_padding_weighs_nothing_and_is_in_documents_no_longer_than_those_there_are() -> None:
    batch = micro_batch((4, 2))
    padded = batch.padded_to(15)
    assert padded.document_lengths == (4, 2, 4, 4, 1)
    assert padded.positions_T[6:].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert (padded.num_loss_tokens, padded.num_real_tokens) == (4.5, 5)
    assert torch.equal(padded.tokens_T[:6], batch.tokens_T)
    assert batch.padded_to(6) is batch
    with pytest.raises(AssertionError, match="6 tokens are more than 5"):
        batch.padded_to(5)
