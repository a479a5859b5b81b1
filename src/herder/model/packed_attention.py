"""Causal attention over packed documents as fused kernels, opaque to the compiler.

Legend: T packed tokens, N query heads, K key-value heads, H head dim, B documents of one length L.

On CPU the flash kernels are called directly, forward and backward, as one custom operator: the
compiler sees one node whose document bounds are data, so new lengths never compile anything again.
Elsewhere scaled_dot_product_attention picks the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from herder.model.attention_spec import AttentionSpec, MaskKind
from herder.model.linear import multiplies_bf16

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds: Tensor, spec: AttentionSpec
) -> Tensor:
    """out_TNH of causal attention within documents.

    bounds: int64 on the host, [documents + 1], where documents start, then T.
    """
    if q_TNH.device.type == "cuda":
        return _sdpa_documents(q_TNH, k_TKH, v_TKH, bounds, spec)
    out_TNH, _ = _forward(q_TNH, k_TKH, v_TKH, bounds, spec.kind, spec.window, spec.scale)
    return out_TNH


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
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds: Tensor, spec: AttentionSpec
) -> Tensor:
    outs = []
    for tokens, num_documents, length in runs(bounds, spec):
        q, k, v = (_as_batch(x[tokens], num_documents, length) for x in (q_TNH, k_TKH, v_TKH))
        bias = sliding_bias(length, spec, q_TNH)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=spec.scale, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In fp32 where this processor would have to emulate bf16 products."""
    if tensors[0].dtype != torch.bfloat16 or multiplies_bf16():
        return tensors
    return tuple(tensor.float() for tensor in tensors)


def _repeat_heads(x_TKH: Tensor, num_heads: int) -> Tensor:
    return x_TKH.repeat_interleave(num_heads // x_TKH.shape[1], dim=1)


@torch.library.custom_op("herder::packed_attention", mutates_args=())
def _forward(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    bounds: Tensor,
    kind: str,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out_TNH, logsumexp_TN in fp32)."""
    spec = AttentionSpec(cast("MaskKind", kind), window, scale)
    dtype = q_TNH.dtype
    q_TNH, k_TKH, v_TKH = _widen(q_TNH, k_TKH, v_TKH)
    k_TNH, v_TNH = _repeat_heads(k_TKH, q_TNH.shape[1]), _repeat_heads(v_TKH, q_TNH.shape[1])
    out_TNH = torch.empty(q_TNH.shape, dtype=dtype)
    logsumexp_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32)
    for tokens, num_documents, length in runs(bounds, spec):
        q, k, v = (_as_batch(x[tokens], num_documents, length) for x in (q_TNH, k_TNH, v_TNH))
        bias = sliding_bias(length, spec, q_TNH)
        out, logsumexp = _flash(q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale)
        _as_batch(out_TNH[tokens], num_documents, length).copy_(out)
        _as_batch(logsumexp_TN[tokens], num_documents, length).copy_(logsumexp)
    return out_TNH, logsumexp_TN


@torch.library.custom_op("herder::packed_attention_backward", mutates_args=())
def _backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    logsumexp_TN: Tensor,
    bounds: Tensor,
    kind: str,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q_TNH, k_TKH and v_TKH."""
    spec = AttentionSpec(cast("MaskKind", kind), window, scale)
    dtype = q_TNH.dtype
    grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH = _widen(grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH)
    k_TNH, v_TNH = _repeat_heads(k_TKH, q_TNH.shape[1]), _repeat_heads(v_TKH, q_TNH.shape[1])
    grads = [torch.empty(x.shape, dtype=dtype) for x in (q_TNH, k_TNH, v_TNH)]
    saved = (grad_TNH, q_TNH, k_TNH, v_TNH, out_TNH, logsumexp_TN)
    for tokens, num_documents, length in runs(bounds, spec):
        grad, q, k, v, out, lse = (_as_batch(x[tokens], num_documents, length) for x in saved)
        bias = sliding_bias(length, spec, q_TNH)
        document_grads = _flash_backward(
            grad, q, k, v, out, lse, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        for whole, part in zip(grads, document_grads, strict=True):
            _as_batch(whole[tokens], num_documents, length).copy_(part)
    q_grad, k_grad, v_grad = grads
    return q_grad, _sum_groups(k_grad, k_TKH), _sum_groups(v_grad, v_TKH)


def _sum_groups(grad_TNH: Tensor, like_TKH: Tensor) -> Tensor:
    if grad_TNH.shape == like_TKH.shape:
        return grad_TNH
    return grad_TNH.unflatten(1, (like_TKH.shape[1], -1)).sum(2)


@_forward.register_fake
def _forward_shapes(q_TNH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)


@_backward.register_fake
def _backward_shapes(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    del grad_TNH
    return tuple(x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKH))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_TNH, k_TKH, v_TKH, bounds, *ctx.spec = inputs
    ctx.save_for_backward(q_TNH, k_TKH, v_TKH, *output, bounds)


def _differentiate(ctx: Any, grad_TNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_TNH, k_TKH, v_TKH, out_TNH, logsumexp_TN, bounds = ctx.saved_tensors
    grads = _backward(
        grad_TNH.contiguous(), q_TNH, k_TKH, v_TKH, out_TNH, logsumexp_TN, bounds, *ctx.spec
    )
    return *grads, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
