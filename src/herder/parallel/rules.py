"""The one table from logical axes to mesh axes, and what it makes of a leaf's parameters.

Total over the closed set of logical axes: a new axis does not import until it has a rule here.
"""

from __future__ import annotations

from typing import get_args

from torch import nn

from herder.model.axes import Axes, Axis

MESH_AXIS: dict[Axis, str | None] = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",  # copied where there are fewer of them than ranks
    "hidden": "tp",
    "embed": None,  # the residual stream is split by tokens, not by its dims
    "head": None,
    "latent": None,  # one latent for all heads
    "experts": "ep",
    "patch": None,
}
assert MESH_AXIS.keys() == set(get_args(Axis)), "every logical axis needs a rule"


def leaf_axes(module: nn.Module) -> Axes | None:
    """The logical axes of a leaf's weight; None for a module without parameters of its own."""
    axes: Axes | None = vars(module).get("axes")
    has_parameters = any(True for _ in module.parameters(recurse=False))
    assert axes is not None or not has_parameters, f"{type(module).__name__} names no axes"
    return axes if has_parameters else None


def parameter_axes(axes: Axes, name: str, num_dims: int) -> Axes:
    """Of one parameter of a leaf: a bias lacks the dim of the inputs, which is the last."""
    if name == "bias":
        axes = axes[:-1]
    assert len(axes) == num_dims, f"{name} has {num_dims} dims, its axes are {axes}"
    return axes


def split_dim(axes: Axes, mesh_axis: str) -> int | None:
    """Which dim the mesh axis splits; None: every rank along it holds the whole."""
    dims = [dim for dim, axis in enumerate(axes) if axis and MESH_AXIS[axis] == mesh_axis]
    assert len(dims) <= 1, f"{mesh_axis} would split several of {axes}"
    return dims[0] if dims else None
