"""The gated feed-forward. Legend: T tokens, D hidden, I intermediate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.config.architecture import Activation, MlpConfig
from herder.errors import ModelError
from herder.model.autograd import Function
from herder.model.kernels import Kernels
from herder.model.linear import Linear


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within it both ways.

    Source: gpt-oss model card, arXiv:2508.10925.
    """

    alpha: float
    limit: float


Gating = Activation | ClampedSwiglu
"""How gate and up become one."""


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x)). Source: GLU variants, arXiv:2002.05202."""

    def __init__(
        self, hidden_size: int, config: MlpConfig, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation: Gating = config.activation
        made = {"bias": config.bias, "device": device, "dtype": dtype}
        width = config.intermediate_size
        self.gate = Linear(hidden_size, width, axes=("hidden", "embed"), **made)
        self.up = Linear(hidden_size, width, axes=("hidden", "embed"), **made)
        self.down = Linear(width, hidden_size, axes=("embed", "hidden"), **made)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate(x_TD), self.up(x_TD)
        return gated(gate_TI, up_TI, self.activation, self.down)


def gated(
    gate_TI: Tensor, up_TI: Tensor, gating: Gating, down: Callable[[Tensor], Tensor]
) -> Tensor:
    """down(gating(gate, up)), keeping gate and up for the backward pass and not their product.

    Compiled code decides for itself what it keeps.
    """
    if gating == "silu" and Kernels.take(gate_TI):
        return down(Kernels.operators.silu_times(gate_TI, up_TI))
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return down(gate_product(gate_TI, up_TI, gating))
    product_TI = _GatedProduct.apply(gate_TI, up_TI, gating)
    parts = gate_TI.detach(), up_TI.detach()
    product_address = product_TI.data_ptr()  # the hooks outlive this call: the product must not

    def pack(kept: Tensor) -> Tensor | None:
        return None if kept.data_ptr() == product_address else kept

    def unpack(kept: Tensor | None) -> Tensor:
        return gate_product(*parts, gating) if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return down(product_TI)


class _GatedProduct(Function):
    """gating(gate, up); what lies between is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor, gating: Gating) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        ctx.gating = gating
        return gate_product(gate_TI, up_TI, gating)

    @staticmethod
    def backward(ctx: Any, grad_TI: Tensor) -> tuple[Tensor | None, ...]:
        gate_TI, up_TI = ctx.saved_tensors
        if isinstance(ctx.gating, ClampedSwiglu):
            leaves = gate_TI.detach().requires_grad_(), up_TI.detach().requires_grad_()
            with torch.enable_grad():
                product_TI = gate_product(*leaves, ctx.gating)
            return *torch.autograd.grad(product_TI, leaves, grad_TI), None
        gate_TI = gate_TI.detach().requires_grad_()
        with torch.enable_grad():
            act_TI = activate(gate_TI, ctx.gating)
        (gate_grad_TI,) = torch.autograd.grad(act_TI, gate_TI, grad_TI * up_TI)
        return gate_grad_TI, act_TI.detach().mul_(grad_TI), None


def gate_product(gate_TI: Tensor, up_TI: Tensor, gating: Gating) -> Tensor:
    """act(gate) * up, or what the experts of gpt-oss do instead."""
    if isinstance(gating, ClampedSwiglu):
        gate_TI = gate_TI.clamp(max=gating.limit)
        up_TI = up_TI.clamp(-gating.limit, gating.limit)
        return (up_TI + 1) * gate_TI * torch.sigmoid(gating.alpha * gate_TI)
    act_TI = activate(gate_TI, gating)
    # In place where nothing needs the factor: one wide tensor less at the same time.
    return act_TI * up_TI if torch.is_grad_enabled() else act_TI.mul_(up_TI)


def activate(x: Tensor, kind: Activation) -> Tensor:
    """The element-wise nonlinearity by name."""
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case _:
            pass
    raise ModelError(f"activation={kind!r} belongs to experts, not to a dense feed-forward")
