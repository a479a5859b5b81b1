"""The base of written-out gradients, typed so that each may name its own arguments."""

from __future__ import annotations

from typing import Any

import torch


class Function(torch.autograd.Function):
    """forward(ctx, *arguments) and backward(ctx, *grads), with any arguments."""

    forward: Any
    backward: Any
