"""Causal attention with any logits, a block of queries at a time, its gradients written out.

For what no fused kernel of torch's computes. Memory grows with BLOCK_QUERIES * B * L, not L * L.

Legend: B documents of one length L, N heads, H head dim of queries and keys, V of values, Q queries
of a block, S the keys from the first to the last that any of them sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from herder.model.attention_spec import AttentionSpec

BLOCK_QUERIES = 512


def attend_blocks(
    q_BNLH: Tensor, k_BNLH: Tensor, v_BNLV: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out_BNLV, logsumexp_BNL in fp32)."""
    out_BNLV = v_BNLV.new_empty(v_BNLV.shape)
    logsumexp_BNL = v_BNLV.new_empty(v_BNLV.shape[:-1], dtype=torch.float32)
    for queries, keys, hidden_QS in _blocks(q_BNLH, spec):
        logits_BNQS = spec.logits(q_BNLH[:, :, queries] @ k_BNLH[:, :, keys].mT)
        logits_BNQS = logits_BNQS.masked_fill(hidden_QS, -torch.inf)
        logsumexp_BNL[:, :, queries] = logits_BNQS.logsumexp(-1)
        shares_BNQS = logits_BNQS.softmax(-1).to(v_BNLV.dtype)
        out_BNLV[:, :, queries] = shares_BNQS @ v_BNLV[:, :, keys]
    return out_BNLV, logsumexp_BNL


def attend_blocks_backward(
    grad_BNLV: Tensor,
    q_BNLH: Tensor,
    k_BNLH: Tensor,
    v_BNLV: Tensor,
    out_BNLV: Tensor,
    logsumexp_BNL: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in fp32. Source: FlashAttention, arXiv:2205.14135, appendix B.2."""
    q_grad, k_grad, v_grad = (
        torch.zeros_like(x, dtype=torch.float32) for x in (q_BNLH, k_BNLH, v_BNLV)
    )
    delta_BNL1 = (grad_BNLV.float() * out_BNLV.float()).sum(-1, keepdim=True)
    for queries, keys, hidden_QS in _blocks(q_BNLH, spec):
        q, k, v = q_BNLH[:, :, queries], k_BNLH[:, :, keys], v_BNLV[:, :, keys]
        grad = grad_BNLV[:, :, queries]
        logits = spec.logits(q @ k.mT)
        shares = (logits - logsumexp_BNL[:, :, queries, None]).exp().masked_fill(hidden_QS, 0.0)
        v_grad[:, :, keys] += shares.to(grad.dtype).mT @ grad
        logits_grad = shares * ((grad @ v.mT).float() - delta_BNL1[:, :, queries])
        if spec.logit_softcap is not None:
            logits_grad *= 1 - (logits / spec.logit_softcap).square()
        products_grad = (logits_grad * spec.scale).to(q.dtype)
        q_grad[:, :, queries] = (products_grad @ k).float()
        k_grad[:, :, keys] += products_grad.mT @ q
    return q_grad, k_grad, v_grad


def _blocks(q_BNLH: Tensor, spec: AttentionSpec) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, the keys they may see, which of those each does not see)."""
    length = q_BNLH.shape[2]
    position_L = torch.arange(length, device=q_BNLH.device)
    for start in range(0, length, BLOCK_QUERIES):
        queries = slice(start, min(start + BLOCK_QUERIES, length))
        keys = slice(spec.first_visible(start), queries.stop)
        yield queries, keys, ~spec.allows(position_L[queries, None], position_L[keys])
