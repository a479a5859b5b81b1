"""From a whole tensor to the part a rank holds, and back.

Owns the arithmetic of placements. Tensor parallelism splits first, sharding then splits what is
left, so that along the mesh axes the last split comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `like`: a view. All of it if that is plain."""
    if not isinstance(like, DTensor):
        return whole
    part = whole
    for split in _splits(like):
        part = part.narrow(split.dim, split.start, split.length)
    held = like.to_local().shape
    assert part.shape == held, f"{tuple(part.shape)} of {tuple(held)} held here"
    return part


@dataclass(frozen=True)
class _Split:
    """One axis' share of one dim: `each` to every rank, less or nothing to the last ones."""

    axis: int
    dim: int
    total: int
    each: int
    start: int
    length: int


def _splits(x: DTensor) -> list[_Split]:
    """In the order in which they were made."""
    mesh = x.device_mesh
    coordinate, shape, splits = mesh.get_coordinate(), list(x.shape), list[_Split]()
    assert coordinate is not None, "a parameter of a mesh that this rank is not in"
    for axis in reversed(range(mesh.ndim)):
        dim = getattr(x.placements[axis], "dim", None)
        if dim is not None:
            total = shape[dim]
            each = -(-total // mesh.size(axis))
            start = min(coordinate[axis] * each, total)
            shape[dim] = min(each, total - start)
            splits.append(_Split(axis, dim, total, each, start, shape[dim]))
    return splits


@torch.no_grad()
def copy_part(parameter: Tensor, whole: Tensor) -> None:
    """Fill what this rank holds of a parameter from the whole value."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    held.copy_(local_part(whole, parameter))


def whole_tensor(x: Tensor) -> Tensor:
    """All of it, on every rank of its mesh: a collective there. Gradients are summed already.

    DTensor.full_tensor takes another order of axes, and warns of it at every call.
    """
    if not isinstance(x, DTensor):
        return x
    part = x.to_local()
    for split in reversed(_splits(x)):
        missing = split.each - split.length
        padded = part
        if missing:
            shape = list(part.shape)
            shape[split.dim] = missing
            padded = torch.cat([part, part.new_zeros(shape)], split.dim)
        group = x.device_mesh.get_group(split.axis)
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded.contiguous(), group=group)
        part = torch.cat(parts, split.dim).narrow(split.dim, 0, split.total)
    return part


def held_tensor(x: Tensor) -> Tensor:
    """What this rank holds of it, as a plain tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
