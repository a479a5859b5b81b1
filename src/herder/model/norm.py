"""RMSNorm in its published variants. Legend: the last dim is normalized."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.config.architecture import NormConfig


class RmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, statistics in fp32. Source: arXiv:1910.07467."""

    def __init__(self, dim: int, config: NormConfig, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight_offset = config.weight_offset
        self.multiply_in_fp32 = config.multiply_in_fp32
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        normed = rms(x.float(), self.eps)
        weight = self.weight + self.weight_offset if self.weight_offset else self.weight
        if self.multiply_in_fp32:
            return (normed * weight.float()).to(x.dtype)
        return normed.to(x.dtype) * weight


def rms(x: Tensor, eps: float) -> Tensor:
    """x divided by the root of its mean square over the last dim, without a weight."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)
