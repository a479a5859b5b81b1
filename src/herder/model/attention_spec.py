"""What one layer's attention computes, as data: shared by every attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
