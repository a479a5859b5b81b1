"""RMSNorm in its published variants. Legend: the last dim is normalized.

The backward pass is written out so that only x and one number a row are kept for it: the plain
formula keeps the normed activations too, once more for every norm of every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from herder.config.architecture import NormConfig
from herder.model.autograd import Function
from herder.model.axes import Axis
from herder.model.kernels import Kernels
from herder.model.linear import product_dtype


class RmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, statistics in fp32. Source: arXiv:1910.07467.

    Under autocast the result is already in its dtype: the projections that read it then share, and
    keep for the backward pass, one tensor instead of a cast copy each.
    """

    def __init__(
        self, dim: int, config: NormConfig, *, axis: Axis, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.axes = (axis,)
        self.eps = config.eps
        self.weight_offset = config.weight_offset
        self.multiply_in_fp32 = config.multiply_in_fp32
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.weight_offset:
            # In fp32 where it stays there: in bf16 most of the weight is lost beside a 1.
            wide = _wide(weight) if self.multiply_in_fp32 else weight
            weight = wide + self.weight_offset
        if torch.is_grad_enabled():
            return _RmsNorm.apply(x, weight, self.eps, self.multiply_in_fp32, product_dtype(x))
        if Kernels.take(x) and weight.dtype == x.dtype:
            return Kernels.operators.rms_norm(x, weight, self.eps, self.multiply_in_fp32)
        normed = rms(_wide(x), self.eps)
        return _weighted(normed, x, weight, self.multiply_in_fp32).to(product_dtype(x))


def rms(x: Tensor, eps: float) -> Tensor:
    """x divided by the root of its mean square over the last dim, without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        multiply_in_fp32: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        wide_x = _wide(x)
        scale = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.multiply_in_fp32 = multiply_in_fp32
        return _weighted(wide_x * scale, x, weight, multiply_in_fp32).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad, normed = _wide(grad), _wide(x) * scale
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = grad * _wide(weight)
        x_grad = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return x_grad.to(x.dtype), weight_grad, None, None, None


def _weighted(normed: Tensor, x: Tensor, weight: Tensor, multiply_in_fp32: bool) -> Tensor:
    if multiply_in_fp32:
        return (normed * _wide(weight)).to(x.dtype)
    return normed.to(x.dtype) * weight


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
