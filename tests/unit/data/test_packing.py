"""Packing keeps every prediction, whole and in place, and wastes little."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from herder.data.packing import PackedRows, best_fit_rows, cut


def offsets_of(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def pack(lengths: list[int], *, sequence_length: int) -> PackedRows:
    """Documents whose tokens are 1, 2, 3, ..., each different from all others."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    return PackedRows(tokens, offsets_of(lengths), sequence_length=sequence_length)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_but_a_documents_first_is_predicted_exactly_once(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 40, size=generator.integers(1, 60)).tolist()
    packed = pack(lengths, sequence_length=int(generator.integers(1, 24)))
    batch = packed.micro_batch(np.arange(packed.num_rows)) if packed.num_rows else None
    predicted: Counter[tuple[int, int]] = Counter()
    if batch is not None:
        real_T = batch.weights_T > 0
        pairs = zip(batch.tokens_T[real_T].tolist(), batch.targets_T[real_T].tolist(), strict=True)
        predicted.update(pairs)
    starts = offsets_of(lengths)
    expected = Counter(
        (token, token + 1)
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        for token in range(start + 1, end)
    )
    assert predicted == expected


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_whole_pieces_and_never_overflow(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 65, size=500)
    rows = best_fit_rows(lengths, row_length=64)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 64
    assert filled.min() > 0


def test_a_document_that_fits_a_row_is_not_cut() -> None:
    pieces = cut(offsets_of([9, 5, 17, 2]), sequence_length=8)
    assert pieces.lengths.tolist() == [8, 4, 8, 8, 1]
    assert pieces.documents.tolist() == [0, 1, 2, 2, 3]
    assert pieces.starts.tolist() == [0, 9, 14, 22, 31]


def test_documents_too_short_to_predict_anything_take_no_room() -> None:
    assert pack([1, 0, 1], sequence_length=8).num_rows == 0


def test_the_tightest_row_is_chosen() -> None:
    rows = best_fit_rows(np.array([6, 5, 3, 2]), row_length=8)
    assert rows.tolist() == [0, 1, 1, 0]


def test_positions_start_anew_at_every_document_and_padding_weighs_nothing() -> None:
    batch = pack([6, 3], sequence_length=8).micro_batch(np.array([0]))
    assert batch.document_lengths == (5, 2, 1)
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.weights_T.tolist() == [1] * 7 + [0]
    assert batch.real_T.tolist() == [True] * 7 + [False]
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 7, 8, 0]
    assert batch.targets_T.tolist() == [2, 3, 4, 5, 6, 8, 9, 0]


def test_a_piece_that_goes_on_has_its_true_next_token_as_last_target() -> None:
    batch = pack([10], sequence_length=4).micro_batch(np.array([0]))
    assert batch.tokens_T.tolist() == [1, 2, 3, 4]
    assert batch.targets_T.tolist() == [2, 3, 4, 5]


def test_rows_side_by_side_hold_what_they_hold_alone() -> None:
    packed = pack([9, 4, 30, 7, 7, 2], sequence_length=8)
    rows = np.array([3, 0, 2])
    together = packed.micro_batch(rows)
    alone = [packed.micro_batch(np.array([row])) for row in rows]
    assert torch.equal(together.tokens_T, torch.cat([batch.tokens_T for batch in alone]))
    assert together.document_lengths == sum((batch.document_lengths for batch in alone), ())


def test_packing_fills_nearly_all_of_a_corpus_of_short_documents() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.6, size=2000).astype(int).clip(2)
    assert pack(lengths.tolist(), sequence_length=512).utilization > 0.99


def test_utilization_is_the_share_of_predictions() -> None:
    assert pack([6, 3], sequence_length=8).utilization == 7 / 8
