"""Replication: every rank has all parameters, and gradients are summed over ranks once a step.

DDP's semantics with its overlap: a bucket's all-reduce starts as soon as the last micro-batch's
backward has filled it. Done here and not by DistributedDataParallel, which wraps the model in
another module, cannot sum a gradient over tensor-parallel ranks too and gives no pipeline stage its
turn. Source: Li et al., arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from herder.parallel.shards import held_tensor

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's own default: large enough to use the links, small enough to overlap."""


class GradientSync:
    """Sums gradients over the ranks that hold the same parameters.

    Parameters that are whole on every tensor-parallel rank are summed over those too.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: DeviceMesh,
        experts: DeviceMesh | None = None,
    ) -> None:
        """experts: the mesh of those parameters that expert parallelism spreads."""
        self._is_last = False
        groups = dict[tuple[str, ...], dist.ProcessGroup]()
        for own, holders in ((mesh, ("dp", "cp")), (experts, ("fsdp",))):
            if own is not None:
                # By every rank and in one order, whatever parameters its stage has: that is how
                # ranks know each group by the same name.
                for axes in (holders, (*holders, "tp")):
                    groups[axes] = _group(own, axes)
        alike: dict[tuple[str, ...], list[nn.Parameter]] = {axes: [] for axes in groups}
        for parameter in parameters:
            split = _split_axes(parameter)
            holders = ("fsdp",) if "ep" in split else ("dp", "cp")
            alike[holders if "tp" in split else (*holders, "tp")].append(parameter)
        self._buckets = [
            bucket for axes, group in groups.items() for bucket in _buckets(alike[axes], group)
        ]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def _arrived(self, bucket: _Bucket, _parameter: Tensor) -> None:
        if self._is_last:
            bucket.add()

    def expect_last(self, *, is_last: bool) -> None:
        """Say whether the backward that comes next is the step's last."""
        self._is_last = is_last
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        """Wait for the sums; those not begun yet (parameters without a gradient) are made now."""
        for bucket in self._buckets:
            bucket.finish()
        self._is_last = False

    def release(self) -> None:
        """Nothing: parameters are whole at all times."""


def _split_axes(parameter: nn.Parameter) -> set[str]:
    """The mesh axes that ranks have different parts of it along."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    return {n for n, each in zip(names, parameter.placements, strict=True) if each.is_shard()}


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self._group = group
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def add(self) -> None:
        """One more gradient is there; the last one starts the sum."""
        self.missing -= 1
        if self.missing == 0:
            self._start()

    def finish(self) -> None:
        if self._group.size() == 1:
            return
        if self._flat is None:
            self._start()
        assert self._flat is not None, "the sum was not started"
        assert self._work is not None, "the sum was not started"
        self._work.wait()
        parts = self._flat.split([held_tensor(p).numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            summed = part.view(held_tensor(parameter).shape)
            parameter.grad = _as_gradient(summed, parameter)
        self._flat, self._work = None, None

    def _start(self) -> None:
        if self._group.size() == 1:
            return
        self._flat = torch.cat([_held_gradient(p).flatten() for p in self.parameters])
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)


def _held_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the sum; zeros where nothing used the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(held_tensor(parameter))
    return held_tensor(parameter.grad)


def _as_gradient(summed: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return summed
    return DTensor.from_local(
        summed,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    return mesh[axes]._flatten().get_group()


def _buckets(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> list[_Bucket]:
    """In the order in which gradients come: from the last parameter to the first."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = held_tensor(parameter).nbytes
        if size > room:
            groups.append([])
            room = BUCKET_BYTES
        groups[-1].append(parameter)
        room -= size
    return [_Bucket(each, group) for each in groups]
