"""torch.compile, layer by layer: one graph a kind of layer, and none falls back in silence.

Compiles in place, so that classes and parameter names stay as they were. Knows layers as modules in
a dict, nothing of what they compute.
"""

from __future__ import annotations

import shutil

import torch
import torch._dynamo
from torch import nn

from herder.errors import ResourceError


def apply_compile(layers: nn.ModuleDict, *, device_type: str) -> None:
    """Compile every layer in place; the first step of each kind of layer takes tens of seconds.

    torch stops compiling after a number of graphs and goes on eagerly, and says nothing: here that
    limit is an error. Raises ResourceError where a CPU build finds no C++ compiler.
    """
    if device_type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "cl")):
        raise ResourceError(
            "train.compile: torch.compile needs a C++ compiler on a CPU, and neither g++ nor "
            "clang++ is on the PATH. Install one, or --set train.compile=false."
        )
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers.values():
        layer.compile()
