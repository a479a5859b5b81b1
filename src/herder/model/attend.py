"""The attend seam: what attention sees and remembers. Layers hand over q, k and v; this decides.

Legend: T this rank's packed tokens, N query heads, K key-value heads, H head dim.

An attend is built once a micro-batch, with its documents, and is pure in training: recomputation
calls it twice. It is a plain class and must stay one (no dataclass, tuple or pytree node): FSDP
rebuilds those on their way into a block and casts the tensors inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from herder.model.attention_spec import AttentionSpec
from herder.model.packed_attention import packed_attention


class Attend:
    """What every attend offers the decoder; subclasses add the attention itself."""

    longest: int
    """One more than the largest position of this forward, as a host number."""

    def layer(self, index: int) -> Attend:
        """The attend of one layer, bound outside the compiled block (so it is one graph a kind)."""
        del index
        return self

    def context_T(self) -> Tensor:
        """How many positions each token's document holds by the end of this forward."""
        raise TypeError(f"{type(self).__name__} does not say how long documents are")

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec) -> Tensor:
        """out_TNH. Query head n reads key-value head n // (N / K)."""
        raise TypeError(f"{type(self).__name__} does not attend")


class _DocumentAttend(Attend):
    """Documents packed one after the other, positions counted from each one's start."""

    def __init__(self, document_lengths: Sequence[int], *, device: str = "cpu") -> None:
        self.document_lengths = tuple(document_lengths)
        self.longest = max(self.document_lengths)
        self.device = device
        self.bounds = torch.tensor([0, *accumulate(self.document_lengths)])

    def context_T(self) -> Tensor:
        lengths = torch.tensor(self.document_lengths)
        return lengths.repeat_interleave(lengths).to(self.device)


class ReferenceAttend(_DocumentAttend):
    """Plain attention with a T x T mask: the oracle that other implementations are held against."""

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec) -> Tensor:
        num_groups = q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH = k_TKH.repeat_interleave(num_groups, dim=1)
        v_TNH = v_TKH.repeat_interleave(num_groups, dim=1)
        scores_NTT = torch.einsum("qnh,knh->nqk", q_TNH, k_TNH).float() * spec.scale
        scores_NTT = scores_NTT.masked_fill(~self._mask_TT(spec, q_TNH.device), -torch.inf)
        weights_NTT = scores_NTT.softmax(-1).to(v_TNH.dtype)
        return torch.einsum("nqk,knh->qnh", weights_NTT, v_TNH)

    def _mask_TT(self, spec: AttentionSpec, device: torch.device) -> Tensor:
        lengths = torch.tensor(self.document_lengths)
        document_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        position_T = torch.cat([torch.arange(length) for length in self.document_lengths])
        same = document_T[:, None] == document_T
        return (same & spec.allows(position_T[:, None], position_T)).to(device)


class PackedAttend(_DocumentAttend):
    """Fused attention, one kernel call a run of documents of equal length; no T x T mask."""

    def __init__(self, document_lengths: Sequence[int], *, device: str = "cpu") -> None:
        super().__init__(document_lengths, device=device)
        # One graph for any number of documents, once compiled.
        torch._dynamo.maybe_mark_dynamic(self.bounds, 0)

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec) -> Tensor:
        return packed_attention(q_TNH, k_TKH, v_TKH, self.bounds, spec)
