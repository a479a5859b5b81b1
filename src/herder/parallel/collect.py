"""Whole tensors on one rank, one at a time, from the parts that ranks hold.

Owns who sends what to whom. Every rank asks for the same tensors in the same order; those that are
not the first rank get an empty answer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from herder.parallel.shards import whole_tensor


class Collector:
    """The tensors of all pipeline stages by name, those of earlier stages first.

    What several stages have (a tied embedding) comes from the first of them. A collective.
    """

    def __init__(self, tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        self._tensors = tensors
        self._mesh = mesh
        self._stage = mesh["pp"].get_local_rank()
        others = [mesh[axis].get_local_rank() for axis in mesh.mesh_dim_names or () if axis != "pp"]
        self._speaks = not any(others)
        self._device = torch.device(mesh.device_type)
        mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        stages: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [mine] * mesh["pp"].size()
        dist.all_gather_object(stages, mine, group=mesh["pp"].get_group())
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._owners: dict[str, int] = {}
        for stage, shapes in enumerate(stages):
            for name, entry in shapes.items():
                self.shapes.setdefault(name, entry)
                self._owners.setdefault(name, stage)

    def read(self, name: str) -> Tensor:
        """The whole tensor on the first rank of the mesh; nothing of use on the others."""
        owner = self._owners[name]
        value = torch.empty(0)
        if self._stage == owner:
            value = whole_tensor(self._tensors[name])
        if owner == 0 or not self._speaks:
            return value
        group = self._mesh["pp"].get_group()
        if self._stage == owner:
            dist.send(value.contiguous(), group=group, group_dst=0)
        elif self._stage == 0:
            shape, dtype = self.shapes[name]
            value = torch.empty(shape, dtype=dtype, device=self._device)
            dist.recv(value, group=group, group_src=owner)
        return value
