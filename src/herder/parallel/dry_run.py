"""A plan tried without its cluster: one rank of the full world, its parameters on the meta device.

The real model goes through the same `apply` as in training, in a process group that communicates
with nobody (torch's own, for its tests, pinned by ours). What the rank holds is then read from its
tensors; the planner's figure is for comparison alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from herder.config.architecture import ArchitectureConfig
from herder.config.record import Record
from herder.model.build import build_decoder
from herder.observe.meters import peak_process_bytes
from herder.parallel.apply import apply
from herder.parallel.mesh import AXES, build_mesh
from herder.parallel.shards import held_tensor
from herder.plan.allocated import MASTER_BYTES
from herder.plan.pipeline import chunks_per_rank
from herder.plan.stages import ModelSizes
from herder.plan.training import TrainingPlan


class DryRun(Record):
    """What one rank of a plan holds of the parameters."""

    rank: int
    num_ranks: int
    coordinates: dict[str, int]
    """Its place on each axis of the mesh."""
    num_tensors: int
    parameter_bytes: int
    """In fp32, read from its tensors."""
    padding_bytes: int
    """What its shards have less than those of the first rank that shares the same parameters. It is
    allocated: collectives take equal parts."""
    planned_parameter_bytes: int
    """The planner's figure for the largest rank of this pipeline stage."""
    unexplained_bytes: int
    """What is allocated beyond that figure; not 0 means that the planner or `apply` is wrong."""
    seconds: float
    peak_memory_bytes: int
    """Of this process."""


def heaviest_rank(plan: TrainingPlan) -> int:
    """The first rank of the pipeline stage that holds most."""
    layout = plan.layout
    return plan.state_bytes.stage * (layout.num_ranks // layout.pipeline_parallel_size)


def dry_run(architecture: ArchitectureConfig, plan: TrainingPlan, rank: int) -> DryRun:
    """Build, lay out and measure the model as that rank. No process group may exist yet.

    Raises PlanError for a plan that this build cannot run.
    """
    assert 0 <= rank < plan.layout.num_ranks, f"rank {rank} of {plan.layout.num_ranks}"
    began, mesh = time.perf_counter(), None
    coordinates = dict.fromkeys(AXES, 0)
    with _alone_in_a_world(rank, plan.layout.num_ranks):
        if plan.layout.num_ranks > 1:
            mesh = build_mesh(plan.mesh_axes, "cpu")
            place = mesh.get_coordinate()
            assert place is not None, "every rank is on the mesh"
            coordinates = dict(zip(AXES, place, strict=True))
        decoder = build_decoder(architecture)
        apply(decoder, plan, mesh, device=torch.device("meta"))
        held = [held_tensor(parameter) for parameter in decoder.parameters()]
    holds = sum(tensor.nbytes for tensor in held)
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in held)
    planned = _planned_bytes(architecture, plan, coordinates["pp"])
    return DryRun(
        rank=rank,
        num_ranks=plan.layout.num_ranks,
        coordinates=coordinates,
        num_tensors=len(held),
        parameter_bytes=holds,
        padding_bytes=allocated - holds,
        planned_parameter_bytes=planned,
        unexplained_bytes=allocated - planned,
        seconds=time.perf_counter() - began,
        peak_memory_bytes=peak_process_bytes(),
    )


def _planned_bytes(architecture: ArchitectureConfig, plan: TrainingPlan, stage: int) -> int:
    layout = plan.layout
    held = ModelSizes(architecture).held_on_rank(
        layout.pipeline_parallel_size,
        stage,
        tp=layout.tensor_parallel_size,
        ep=layout.expert_parallel_size,
        num_shards=layout.num_shards,
        chunks=chunks_per_rank(plan.pipeline_schedule),
    )
    return MASTER_BYTES * (held.share if layout.zero_stage > 0 else held.whole)


@contextmanager
def _alone_in_a_world(rank: int, num_ranks: int) -> Generator[None]:
    """A process group of so many ranks, of which only this one exists."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
