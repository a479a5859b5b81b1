"""Activation recompute: a layer keeps its input alone and computes the rest again going backward.

Uses torch's composable checkpoint, a set of hooks: the layer keeps its class, its forward and its
parameters' names, which the wrapper modules do not. It is in a private module of torch; a test pins
that it is there and does this. Knows layers as modules in a dict, nothing of what they compute.
"""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.distributed._composable import checkpoint


def apply_recompute(layers: nn.ModuleDict, recompute: Literal["none", "full"]) -> None:
    """Make every layer forget its activations (`full`) or leave them (`none`).

    The same numbers come out, a third more FLOPs go in. To be called before `apply_compile` and
    before sharding. Source: arXiv:1604.06174, section 4.
    """
    if recompute == "full":
        for layer in layers.values():
            checkpoint(layer)
