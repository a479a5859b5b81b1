"""Plain attention with a T x T mask: the oracle that fused attention is held against.

Legend: T packed tokens, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from herder.model.attend import PackedAttend
from herder.model.attention_spec import AttentionSpec, shares


class ReferenceAttend(PackedAttend):
    """The same documents, attended to without any kernel."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        num_groups = q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH = k_TKH.repeat_interleave(num_groups, dim=1)
        v_TNH = v_TKH.repeat_interleave(num_groups, dim=1)
        logits_NTT = spec.logits(torch.einsum("qnh,knh->nqk", q_TNH, k_TNH))
        logits_NTT = logits_NTT.masked_fill(~self.mask_TT(spec, q_TNH.device), -torch.inf)
        sinks_N11 = None if sinks_N is None else sinks_N[:, None, None]
        shares_NTT = shares(logits_NTT, sinks_N11).to(v_TNH.dtype)
        return torch.einsum("nqk,knh->qnh", shares_NTT, v_TNH)

    def mask_TT(self, spec: AttentionSpec, device: torch.device) -> Tensor:
        """Whether each query sees each key."""
        lengths = torch.tensor(self.document_lengths)
        document_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        position_T = torch.cat([torch.arange(length) for length in self.document_lengths])
        same = document_T[:, None] == document_T
        return (same & spec.allows(position_T[:, None], position_T)).to(device)
