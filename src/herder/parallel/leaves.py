"""A module's parameters split over mesh axes, and what of them it sees while it computes.

Parameters become DTensors, placed by the table of rules; during a forward plain tensors stand in
their place, so that no forward knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from herder.model.axes import Axes
from herder.parallel.rules import parameter_axes, split_dim


class Leaf:
    """A module with parameters: how they are split, and its part of them while it computes."""

    def __init__(
        self, module: nn.Module, axes: Axes, mesh: DeviceMesh, num_copied_heads: int | None = None
    ) -> None:
        self.module = module
        self.axes = axes
        self.mesh = mesh
        self.num_copied_heads = num_copied_heads
        """Set where key-value heads are fewer than ranks: each holds all of them and uses one."""
        self._held = list[dict[str, Any]]()

    def split(self, made: dict[int, nn.Parameter]) -> None:
        """Replace parameters by DTensors; `made` has those that were replaced before."""
        for name, parameter in list(self.module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                placements = self._placements(name, parameter.ndim)
                split = _distributed(parameter, self.mesh, placements)
                made[id(parameter)] = nn.Parameter(split, requires_grad=parameter.requires_grad)
            self.module.register_parameter(name, made[id(parameter)])

    def register(self) -> None:
        """Let the module see its own part for as long as its forward runs, errors included."""
        self.module.register_forward_pre_hook(lambda *_: self.enter())
        self.module.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def enter(self) -> None:
        """Put plain tensors in the parameters' places."""
        parameters: dict[str, Any] = self.module._parameters
        self._held.append(dict(parameters))
        for name, parameter in self._held[-1].items():
            if isinstance(parameter, DTensor):
                parameters[name] = self._part(name, parameter)

    def leave(self) -> None:
        """Put the parameters back."""
        self.module._parameters.update(self._held.pop())

    def _placements(self, name: str, num_dims: int) -> list[Placement]:
        axes = parameter_axes(self.axes, name, num_dims)
        dims = [split_dim(axes, mesh_axis) for mesh_axis in self.mesh.mesh_dim_names or ()]
        if self.num_copied_heads is not None:
            return [Replicate() for _ in dims]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def _part(self, name: str, parameter: DTensor) -> Tensor:
        gradients = [each if each.is_shard() else Partial() for each in parameter.placements]
        part = parameter.to_local(grad_placements=gradients)
        if self.num_copied_heads is not None:
            rows = part.shape[0] // self.num_copied_heads
            head = self.mesh.get_local_rank() * self.num_copied_heads // self.mesh.size()
            return part.narrow(0, head * rows, rows)
        sums_inputs = len(self.axes) > 1 and split_dim(self.axes[-1:], "tp") is not None
        if name == "bias" and sums_inputs and "tp" in (self.mesh.mesh_dim_names or ()):
            return part / self.mesh["tp"].size()  # every rank adds it to its part of the sum
        return part


def _distributed(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """This rank's part of a parameter, of which every rank has the whole, possibly on meta."""
    whole = parameter.detach()
    part, coordinate = whole, mesh.get_coordinate()
    assert coordinate is not None, "a mesh that this rank is not in"
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            part = part.chunk(mesh.size(axis), placement.dim)[coordinate[axis]]
    part = part if part is whole else part.clone()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
