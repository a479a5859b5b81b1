"""One micro-batch: exactly T packed tokens, with the lengths of the documents in them.

Owns the record that training, evaluation and the pipeline schedule pass around. It knows nothing of
files, tokenizers, ranks or the model.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_TENSORS = ("tokens_T", "positions_T", "targets_T", "weights_T", "real_T")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents side by side, each whole, filled up to T tokens by documents of weight 0.

    Attention and positions start anew at every document, so the loss of a packed micro-batch equals
    that of its documents computed one by one.
    """

    tokens_T: Tensor
    """int64: what the model reads."""
    positions_T: Tensor
    """int64: 0, 1, 2, ... within each document."""
    targets_T: Tensor
    """int64: the token that follows in the document; meaningless where the weight is 0."""
    weights_T: Tensor
    """float32: how much each prediction counts; 0 for padding."""
    real_T: Tensor
    """bool: False for padding, which no router sees. A real token too may have weight 0."""
    document_lengths: tuple[int, ...]
    """In tokens, in order, padding documents included; they add up to T."""
    first_token: int = 0
    """The first token's number within its optimizer step, padding counted: it does not depend on
    how the step is cut into micro-batches."""

    def __post_init__(self) -> None:
        total = sum(self.document_lengths)
        for name in _TENSORS:
            shape = tuple(getattr(self, name).shape)
            assert shape == (total,), f"documents hold {total} tokens, {name} is {shape}"
        assert min(self.document_lengths) > 0, f"an empty document in {self.document_lengths}"

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return len(self.tokens_T)

    @property
    def num_loss_tokens(self) -> float:
        """The sum of the weights: what a summed loss is divided by."""
        return float(self.weights_T.sum())

    @property
    def num_real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.real_T.sum())

    def padded_to(self, num_tokens: int) -> MicroBatch:
        """The same micro-batch with padding behind, in documents no longer than those it has."""
        missing, longest = num_tokens - self.num_tokens, max(self.document_lengths)
        assert missing >= 0, f"{self.num_tokens} tokens are more than {num_tokens}"
        if missing == 0:
            return self
        position_P = torch.arange(missing, device=self.positions_T.device) % longest
        tails = dict.fromkeys(_TENSORS, torch.zeros_like(position_P))
        tails["positions_T"] = position_P
        padded = {}
        for name, tail_P in tails.items():
            head_T: Tensor = getattr(self, name)
            padded[name] = torch.cat([head_T, tail_P.to(head_T.dtype)])
        lengths = [longest] * (missing // longest) + [missing % longest]
        added = tuple(length for length in lengths if length)
        return replace(self, **padded, document_lengths=(*self.document_lengths, *added))

    def emptied(self) -> MicroBatch:
        """One of the same shape that is all padding: nothing is learned from it."""
        nothing = torch.zeros_like(self.weights_T), torch.zeros_like(self.real_T)
        return replace(self, weights_T=nothing[0], real_T=nothing[1])

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(self, **moved)
