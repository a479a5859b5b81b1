"""How close a router's choice was: a token between two experts may go either way by rounding.

Layouts sum in other orders, and a choice that turns on the last bit is then another one, which no
layout is to blame for. Verification looks for data in which no choice is that close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MIN_MARGIN = 4e-6
"""Of the chosen value. Layouts differ by up to 2e-6 in a router's logits, whose scale is 1."""
MAX_SEEDS = 16
"""Of data, before the one with the widest margin is taken."""


class ClosestChoice(TorchDispatchMode):
    """Watches every top-k: by how much, at least, what was chosen last was above what was not."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = torch.inf
        """Relative to the value that was chosen last."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute as always, and look at what comes next."""
        if func is torch.ops.aten.topk.default and args[1] < args[0].shape[-1]:
            top = args[0].topk(args[1] + 1).values
            margin = (top[..., -2] - top[..., -1]) / top[..., -2].abs()
            self.margin = min(self.margin, float(margin.nan_to_num(torch.inf, torch.inf).min()))
        return func(*args, **(kwargs or {}))
