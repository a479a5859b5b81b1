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

_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
"""Where a module keeps its hooks, and which of them are of some kind."""


def apply_compile(layers: nn.ModuleDict, *, device_type: str) -> None:
    """Compile every layer in place; the first step of each kind of layer takes tens of seconds.

    torch stops compiling after a number of graphs and goes on eagerly, and says nothing: here that
    limit is an error. To be called when all hooks inside layers are there that graphs shall hold,
    and before sharding. Raises ResourceError where a CPU build finds no C++ compiler.
    """
    if device_type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "cl")):
        raise ResourceError(
            "train.compile: torch.compile needs a C++ compiler on a CPU, and neither g++ nor "
            "clang++ is on the PATH. Install one, or --set train.compile=false."
        )
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers.values():
        for module in layer.modules():
            if module is not layer:
                _number_hooks(module)
        layer.compile()


def _number_hooks(module: nn.Module) -> None:
    """Count a module's hooks from 0, as in every other layer.

    A hook's key is its number among all hooks of the process, and a graph is for those numbers:
    layers that are the same but for them would have a graph each. Hooks are traced into the graph;
    none of these is ever removed, which would need the key it was given.
    """
    for hooks, kinds in _HOOKS.items():
        numbers = {key: number for number, key in enumerate(getattr(module, hooks))}
        for name in (hooks, *kinds):
            keyed = getattr(module, name)
            numbered = [(numbers[key], value) for key, value in keyed.items()]
            keyed.clear()
            keyed.update(numbered)
