"""Causal attention over packed documents as fused kernels, opaque to the compiler.

Legend: T packed tokens, N query heads, K key-value heads, H head dim of queries and keys, V of
values, B documents of one length L.

On CPU the flash kernels are called directly, forward and backward, as one custom operator: the
compiler sees one node whose document bounds are data, so new lengths never compile anything again.
Capped logits, which those kernels lack, take blockwise products in the same operator. On CUDA all
this is for what `flex` cannot do (no Triton, narrow heads) and for prompts that are served: there
scaled_dot_product_attention picks the kernel, or the operator where there are caps or sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from herder.model.attention_spec import AttentionSpec, MaskKind
from herder.model.blockwise_attention import attend_blocks, attend_blocks_backward
from herder.model.linear import widen

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    bounds: Tensor,
    spec: AttentionSpec,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """out_TNV of causal attention within documents.

    bounds: int64 on the host, [documents + 1], where documents start, then T.
    """
    plain = spec.logit_softcap is None and sinks_N is None
    if q_TNH.device.type == "cuda" and plain:
        return _sdpa_documents(q_TNH, k_TKH, v_TKV, bounds, spec)
    fields = (spec.kind, spec.window, spec.scale, spec.logit_softcap)
    out_TNV, _ = _forward(q_TNH, k_TKH, v_TKV, sinks_N, bounds, *fields)
    return out_TNV


def runs(bounds: Tensor, spec: AttentionSpec) -> Iterator[tuple[slice, int, int]]:
    """(tokens, documents B, length L) for each run of neighbours of equal length.

    A chunk sees nothing outside itself, so a chunked layer's documents are its chunks.
    """
    start = 0
    for length, group in groupby(_lengths(bounds, spec)):
        num_documents = sum(1 for _ in group)
        end = start + num_documents * length
        yield slice(start, end), num_documents, length
        start = end


def _lengths(bounds: Tensor, spec: AttentionSpec) -> Iterator[int]:
    for start, end in pairwise(bounds.tolist()):
        if spec.kind != "chunked":
            yield end - start
            continue
        whole, rest = divmod(end - start, spec.window)
        yield from [spec.window] * whole
        if rest:
            yield rest


def sliding_bias(length: int, spec: AttentionSpec, like: Tensor) -> Tensor | None:
    """0 or -inf, [L, L] in the activations' dtype, where a window is narrower than the document."""
    if spec.kind != "sliding" or length <= spec.window:
        return None
    position_L = torch.arange(length, device=like.device)
    allowed_LL = spec.allows(position_L[:, None], position_L)
    bias_LL = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return bias_LL.masked_fill_(~allowed_LL, -torch.inf)


def _as_batch(x_TNH: Tensor, num_documents: int, length: int) -> Tensor:
    """[B, N, L, H], a view."""
    return x_TNH.view(num_documents, length, *x_TNH.shape[1:]).transpose(1, 2)


def _sdpa_documents(
    q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, bounds: Tensor, spec: AttentionSpec
) -> Tensor:
    outs = []
    shares_heads = q_TNH.shape[1] != k_TKH.shape[1]
    for tokens, num_documents, length in runs(bounds, spec):
        q, k, v = (_as_batch(x[tokens], num_documents, length) for x in (q_TNH, k_TKH, v_TKV))
        bias = sliding_bias(length, spec, q_TNH)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            is_causal=bias is None,
            scale=spec.scale,
            enable_gqa=shares_heads,
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _repeat_heads(x_TKH: Tensor, num_heads: int) -> Tensor:
    return x_TKH.repeat_interleave(num_heads // x_TKH.shape[1], dim=1)


def _attend_run(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out_BNLV, logsumexp_BNL) of documents of one length."""
    if spec.logit_softcap is not None or q.device.type != "cpu":
        return attend_blocks(q, k, v, spec)
    bias = sliding_bias(q.shape[2], spec, q)
    padded = _as_wide(q, k, v)
    out, logsumexp = _flash(*padded, 0.0, bias is None, attn_mask=bias, scale=spec.scale)
    return out[..., : v.shape[-1]], logsumexp


def _attend_run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    if spec.logit_softcap is not None or q.device.type != "cpu":
        return attend_blocks_backward(grad, q, k, v, out, logsumexp, spec)
    bias = sliding_bias(q.shape[2], spec, q)
    grad, *padded, out = _as_wide(grad, q, k, v, out)
    grads = _flash_backward(
        grad, *padded, out, logsumexp, 0.0, bias is None, attn_mask=bias, scale=spec.scale
    )
    return tuple(x_grad[..., : x.shape[-1]] for x_grad, x in zip(grads, (q, k, v), strict=True))


def _as_wide(*tensors: Tensor) -> list[Tensor]:
    """Zeros appended up to the widest head: flash takes one head dim for queries and values."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


@torch.library.custom_op("herder::packed_attention", mutates_args=())
def _forward(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    sinks_N: Tensor | None,
    bounds: Tensor,
    kind: str,
    window: int,
    scale: float,
    logit_softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(out_TNV, logsumexp_TN in fp32).

    A sink takes part in the softmax alone: it adds to the sum that shares are divided by, so that
    it scales what comes out of attention without it.
    """
    spec = AttentionSpec(cast("MaskKind", kind), window, scale, logit_softcap)
    num_heads = q_TNH.shape[1]
    out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], v_TKV.shape[-1])
    logsumexp_TN = q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)
    q_TNH, k_TKH, v_TKV = widen(q_TNH, k_TKH, v_TKV)
    k_TNH, v_TNV = _repeat_heads(k_TKH, num_heads), _repeat_heads(v_TKV, num_heads)
    for tokens, num_documents, length in runs(bounds, spec):
        q, k, v = (_as_batch(x[tokens], num_documents, length) for x in (q_TNH, k_TNH, v_TNV))
        out, logsumexp = _attend_run(q, k, v, spec)
        if sinks_N is not None:
            with_sink = torch.logaddexp(logsumexp, sinks_N.float()[:, None])
            out, logsumexp = out * (logsumexp - with_sink).exp()[..., None], with_sink
        _as_batch(out_TNV[tokens], num_documents, length).copy_(out)
        _as_batch(logsumexp_TN[tokens], num_documents, length).copy_(logsumexp)
    return out_TNV, logsumexp_TN


@torch.library.custom_op("herder::packed_attention_backward", mutates_args=())
def _backward(
    grad_TNV: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    out_TNV: Tensor,
    logsumexp_TN: Tensor,
    bounds: Tensor,
    kind: str,
    window: int,
    scale: float,
    logit_softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q_TNH, k_TKH and v_TKV; a sink is already in logsumexp_TN and out_TNV."""
    spec = AttentionSpec(cast("MaskKind", kind), window, scale, logit_softcap)
    dtype, num_heads = q_TNH.dtype, q_TNH.shape[1]
    grad_TNV, q_TNH, k_TKH, v_TKV, out_TNV = widen(grad_TNV, q_TNH, k_TKH, v_TKV, out_TNV)
    k_TNH, v_TNV = _repeat_heads(k_TKH, num_heads), _repeat_heads(v_TKV, num_heads)
    grads = [x.new_empty(x.shape, dtype=dtype) for x in (q_TNH, k_TNH, v_TNV)]
    saved = (grad_TNV, q_TNH, k_TNH, v_TNV, out_TNV, logsumexp_TN)
    for tokens, num_documents, length in runs(bounds, spec):
        grad, q, k, v, out, lse = (_as_batch(x[tokens], num_documents, length) for x in saved)
        run_grads = _attend_run_backward(grad, q, k, v, out, lse, spec)
        for whole, part in zip(grads, run_grads, strict=True):
            _as_batch(whole[tokens], num_documents, length).copy_(part)
    q_grad, k_grad, v_grad = grads
    return q_grad, _sum_groups(k_grad, k_TKH), _sum_groups(v_grad, v_TKV)


def _sum_groups(grad_TNH: Tensor, like_TKH: Tensor) -> Tensor:
    if grad_TNH.shape == like_TKH.shape:
        return grad_TNH
    return grad_TNH.unflatten(1, (like_TKH.shape[1], -1)).sum(2)


@_forward.register_fake
def _forward_shapes(q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    del k_TKH
    rows = q_TNH.shape[:2]
    return q_TNH.new_empty(*rows, v_TKV.shape[-1]), q_TNH.new_empty(rows, dtype=torch.float32)


@_backward.register_fake
def _backward_shapes(
    grad_TNV: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    del grad_TNV
    return tuple(x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKV))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_TNH, k_TKH, v_TKV, sinks_N, bounds, *ctx.spec = inputs
    ctx.save_for_backward(q_TNH, k_TKH, v_TKV, sinks_N, bounds, *output)


def _differentiate(ctx: Any, grad_TNV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_TNH, k_TKH, v_TKV, sinks_N, bounds, out_TNV, logsumexp_TN = ctx.saved_tensors
    grads = _backward(
        grad_TNV.contiguous(), q_TNH, k_TKH, v_TKV, out_TNV, logsumexp_TN, bounds, *ctx.spec
    )
    sinks_grad = None
    if sinks_N is not None:
        shares_TN = (sinks_N.float() - logsumexp_TN).exp()
        sinks_grad_TN = -shares_TN * (grad_TNV.float() * out_TNV.float()).sum(-1)
        sinks_grad = sinks_grad_TN.sum(0).to(sinks_N.dtype)
    return *grads, sinks_grad, *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_save)
