"""What one layer's attention computes, as data: shared by every attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MaskKind = Literal["full", "sliding", "chunked"]


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention computes, apart from its weights."""

    kind: MaskKind
    window: int
    """sliding: keys a query sees, itself included. chunked: length of a chunk. full: 0."""
    scale: float
    """Multiplies q.k."""
    logit_softcap: float | None = None

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query at one position sees a key at another, of the same document; broadcasts.

        Sources: sliding as arXiv:2310.06825 section 2, W keys with the query's own; chunked as
        Llama 4, whole chunks counted from the document's start.
        """
        causal = key <= query
        if self.kind == "sliding":
            return causal & (key > query - self.window)
        if self.kind == "chunked":
            return causal & (key // self.window == query // self.window)
        return causal

    def first_visible(self, position: int) -> int:
        """The first key that a query at `position`, or any later one, may see."""
        if self.kind == "sliding":
            return max(0, position - self.window + 1)
        if self.kind == "chunked":
            return position // self.window * self.window
        return 0

    def logits(self, products: Tensor) -> Tensor:
        """q.k scaled and, where there is a cap, cap * tanh(logits / cap); fp32, before the mask.

        Source: Gemma 2, arXiv:2408.00118, section 2.
        """
        logits = products.float() * self.scale
        cap = self.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def shares(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the last dim, with one more logit that attends to nothing, where there is one.

    sink: broadcasts against logits, its last dim 1. Source: gpt-oss, arXiv:2508.10925, section 2.3.
    """
    if sink is None:
        return logits.softmax(-1)
    sinks = sink.float().expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
