"""The gated feed-forward. Legend: T tokens, D hidden, I intermediate."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.config.architecture import Activation, MlpConfig
from herder.errors import ModelError
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
        return self.down(activate(self.gate(x_TD), self.activation) * self.up(x_TD))


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
