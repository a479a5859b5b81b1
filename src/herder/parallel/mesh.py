"""The process group and the mesh of a plan: which ranks there are, and where on it this one stands.

Owns joining and leaving. The order of the axes is the plan's: the slowest links first.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from herder.errors import PlanError

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""dp copies state, fsdp shards it. Experts are spread within dp, fsdp and cp."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process among those of a job, as torchrun and its like number them."""

    index: int
    count: int
    local_index: int


def rank_from_environment() -> Rank | None:
    """Of RANK, WORLD_SIZE and LOCAL_RANK; None where they are not set: a process of its own."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    index = int(os.environ["RANK"])
    local = int(os.environ.get("LOCAL_RANK", index))
    return Rank(index, int(os.environ["WORLD_SIZE"]), local)


def refuse_other_world(mesh_axes: Mapping[str, int], num_ranks: int) -> None:
    """Raise PlanError, before any process group exists, where a plan is for other ranks."""
    needed = 1
    for axis in AXES:
        needed *= mesh_axes[axis]
    if needed != num_ranks:
        degrees = " x ".join(f"{axis} {mesh_axes[axis]}" for axis in AXES if mesh_axes[axis] > 1)
        raise PlanError(
            f"layout: the plan is for {needed} ranks ({degrees or 'one'}), and {num_ranks} were "
            f"started. Start {needed}, or give cluster.nodes and cluster.gpus_per_node so that "
            f"their product is {num_ranks}."
        )


@contextmanager
def joined(
    rank: Rank, device: torch.device, *, timeout_seconds: float, store: dist.Store | None = None
) -> Generator[None]:
    """Be one of the ranks for a while. A collective that takes longer than the time-out fails.

    store: where ranks meet; None: at MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank.index,
        world_size=rank.count,
        timeout=timedelta(seconds=timeout_seconds),
        store=store,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_mesh(mesh_axes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """The mesh of a plan over all ranks of the process group."""
    refuse_other_world(mesh_axes, dist.get_world_size())
    return init_device_mesh(
        device_type, tuple(mesh_axes[axis] for axis in AXES), mesh_dim_names=AXES
    )
