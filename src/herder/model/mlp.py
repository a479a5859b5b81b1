"""The gated feed-forward. Legend: T tokens, D hidden, I intermediate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.config.architecture import Activation, MlpConfig
from herder.errors import ModelError
from herder.model.autograd import Function
from herder.model.kernels import Kernels
from herder.model.linear import Linear


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x)). Source: GLU variants, arXiv:2002.05202."""

    def __init__(
        self, hidden_size: int, config: MlpConfig, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = config.activation
        made = {"bias": config.bias, "device": device, "dtype": dtype}
        self.gate = Linear(hidden_size, config.intermediate_size, **made)
        self.up = Linear(hidden_size, config.intermediate_size, **made)
        self.down = Linear(config.intermediate_size, hidden_size, **made)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate(x_TD), self.up(x_TD)
        return gated(gate_TI, up_TI, self.activation, self.down)


def gated(
    gate_TI: Tensor, up_TI: Tensor, activation: Activation, down: Callable[[Tensor], Tensor]
) -> Tensor:
    """down(act(gate) * up), keeping gate and up for the backward pass and not their product.

    Compiled code decides for itself what it keeps.
    """
    if activation == "silu" and Kernels.take(gate_TI):
        return down(Kernels.operators.silu_times(gate_TI, up_TI))
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return down(activate(gate_TI, activation) * up_TI)
    product_TI = _GatedProduct.apply(gate_TI, up_TI, activation)
    parts = gate_TI.detach(), up_TI.detach()
    product_address = product_TI.data_ptr()  # the hooks outlive this call: the product must not

    def pack(kept: Tensor) -> Tensor | None:
        return None if kept.data_ptr() == product_address else kept

    def unpack(kept: Tensor | None) -> Tensor:
        return activate(parts[0], activation) * parts[1] if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return down(product_TI)


class _GatedProduct(Function):
    """act(gate) * up; act(gate) is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        ctx.activation = activation
        return activate(gate_TI, activation).mul_(up_TI)

    @staticmethod
    def backward(ctx: Any, grad_TI: Tensor) -> tuple[Tensor | None, ...]:
        gate_TI, up_TI = (kept.detach().requires_grad_() for kept in ctx.saved_tensors)
        with torch.enable_grad():
            product_TI = activate(gate_TI, ctx.activation) * up_TI
        return *torch.autograd.grad(product_TI, (gate_TI, up_TI), grad_TI), None


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
