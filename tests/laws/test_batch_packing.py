"""Law: a packed micro-batch costs and teaches what its documents do one by one, in every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from herder.data.packing import PackedRows
from herder.families.registry import architecture_from_hf, families
from herder.model.attend import PackedAttend
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from herder.model.readout import LossReadout
from tests.reference_attend import ReferenceAttend

LENGTHS = (31, 3, 17, 2, 60, 12)
"""One longer than a row: it is cut, and each piece is a document to the model."""
SEQUENCE_LENGTH = 32


def tiny_decoder(family: str) -> Decoder:
    config = architecture_from_hf(families()[family].tiny_config(), name=family)
    decoder = build_decoder(config)
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    return decoder


def packed_corpus(vocab_size: int) -> PackedRows:
    tokens = np.random.default_rng(0).integers(0, vocab_size, size=sum(LENGTHS))
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    return PackedRows(tokens, offsets, sequence_length=SEQUENCE_LENGTH)


def gradients(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("family", sorted(families()))
def test_packed_documents_cost_and_teach_what_they_do_alone(family: str) -> None:
    decoder = tiny_decoder(family)
    packed = packed_corpus(decoder.config.vocab_size)
    batch = packed.micro_batch(np.arange(packed.num_rows))
    assert (batch.weights_T == 0).any(), "the case has no padding"
    together = decoder(
        batch.tokens_T,
        positions_T=batch.positions_T,
        attend=PackedAttend(batch.document_lengths),
        readout=LossReadout(batch.targets_T, batch.weights_T, chunk_tokens=50),
    )
    alone = torch.zeros(())
    for start, length in zip(
        packed.pieces.starts.tolist(), packed.pieces.lengths.tolist(), strict=True
    ):
        piece = torch.from_numpy(packed.tokens[start : start + length + 1].astype(np.int64))
        logits_TV = decoder(
            piece[:-1], positions_T=torch.arange(length), attend=ReferenceAttend([length])
        )
        alone = alone + F.cross_entropy(logits_TV, piece[1:], reduction="sum")
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    expected = gradients(decoder, alone)
    for name, gradient in gradients(decoder, together).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
