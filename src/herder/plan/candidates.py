"""Layouts worth pricing, each with the micro-batch and recompute that make it fit.

Owns the order of the simplest plan, the whole space of the fastest one, and why a candidate is
refused: memory, or a data-parallel group beyond the cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from herder.config.catalog import cluster_gpu
from herder.config.run import ClusterConfig, TrainConfig
from herder.plan.layout import (
    MAX_DATA_PARALLEL_RANKS,
    Layout,
    divisors,
    legal_expert_degrees,
    legal_tensor_degrees,
)
from herder.plan.memory import (
    MemoryGb,
    Recompute,
    Workload,
    even_share,
    memory_budget_bytes,
    state_bytes,
    state_widths,
    training_memory,
)
from herder.plan.stages import ModelSizes

MICRO_BATCH_TARGET_TOKENS = {"gpu": 16_384, "cpu": 2_048}
"""A micro-batch grows up to this where memory allows: matrix products of this many rows run near
their peak, and more rows only take memory."""
MAX_CONTEXT_PARALLEL_SIZE = 64
MIN_TOKENS_PER_CONTEXT_RANK = 4_096
"""Context parallelism is for length: with fewer tokens a rank, other axes split the work with less
communication. Llama 3 gave each rank 8,192 of 131,072, arXiv:2407.21783, table 4."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a training plan is asked for, beside the model and the cluster."""

    train: TrainConfig
    typical_batch_tokens: int | None
    """Global batch to aim at where train.global_batch_tokens is null; None: one micro-batch a
    data-parallel rank and pipeline stage."""
    chooses_recompute: bool
    """Whether recompute is the planner's to choose; else train.recompute holds."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout that fits, with what makes it fit."""

    layout: Layout
    workload: Workload
    memory: MemoryGb

    @property
    def global_batch_tokens(self) -> int:
        micro_batches = self.workload.num_micro_batches * self.layout.data_parallel_size
        return self.workload.micro_batch_tokens * micro_batches


def layouts_by_simplicity(
    sizes: ModelSizes, cluster: ClusterConfig, sequence_length: int
) -> Iterator[Layout]:
    """TP 1, then the largest legal TP; then pipeline stages; at each step EP, and ZeRO 1, 2, 3.

    Context parallelism comes last, when none of these fit: only length asks for it.
    """
    architecture, world = sizes.architecture, cluster.num_gpus
    largest = legal_tensor_degrees(architecture, cluster)[-1]
    for cp in _context_degrees(world, sequence_length):
        steps = [(1, 1)] + [(largest, pp) for pp in divisors(world // largest)]
        for tp, pp in dict.fromkeys(steps):
            if world % (tp * pp * cp) or pp > architecture.num_layers:
                continue
            dp = world // (tp * pp * cp)
            for ep in legal_expert_degrees(architecture, dp):
                for stage in (1, 2, 3) if dp * cp > 1 else (0,):
                    yield make_layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero_stage=stage)


def all_layouts(
    sizes: ModelSizes, cluster: ClusterConfig, sequence_length: int
) -> Iterator[Layout]:
    """Every legal layout whose data-parallel group is within the cap."""
    architecture, world = sizes.architecture, cluster.num_gpus
    for tp in legal_tensor_degrees(architecture, cluster):
        for pp in divisors(world // tp):
            for cp in _context_degrees(world, sequence_length):
                if pp > architecture.num_layers or world % (tp * pp * cp):
                    continue
                dp = world // (tp * pp * cp)
                if dp * cp > MAX_DATA_PARALLEL_RANKS:
                    continue
                for ep in legal_expert_degrees(architecture, dp):
                    for stage in (0, 1, 2, 3) if dp * cp > 1 else (0,):
                        yield make_layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero_stage=stage)


def make_layout(*, tp: int, pp: int, dp: int, cp: int, ep: int, zero_stage: int) -> Layout:
    """A Layout from short names."""
    stage: Literal[0, 1, 2, 3] = (0, 1, 2, 3)[zero_stage]
    return Layout(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        context_parallel_size=cp,
        expert_parallel_size=ep,
        zero_stage=stage,
    )


def _context_degrees(world: int, sequence_length: int) -> Iterator[int]:
    yield 1
    degree = 2
    longest = sequence_length // MIN_TOKENS_PER_CONTEXT_RANK
    while degree <= min(MAX_CONTEXT_PARALLEL_SIZE, world, longest):
        yield degree
        degree *= 2


def fits(
    sizes: ModelSizes, layout: Layout, cluster: ClusterConfig, request: Request
) -> Iterator[Fit]:
    """The ways this layout fits: without recompute before with it, large micro-batches first."""
    gpu = cluster_gpu(cluster)
    widths = state_widths(layout, request.train.precision)
    if state_bytes(even_share(sizes, layout), layout, widths) > memory_budget_bytes(gpu):
        return
    for workload in workloads(layout, gpu.kind, request):
        memory = training_memory(sizes, layout, workload, gpu)
        if memory.total <= memory.budget:
            yield Fit(layout, workload, memory)


def least_memory(
    sizes: ModelSizes, layout: Layout, cluster: ClusterConfig, request: Request
) -> MemoryGb | None:
    """What the smallest workload of this layout takes; None where no micro-batch divides."""
    gpu = cluster_gpu(cluster)
    choices = list(workloads(layout, gpu.kind, request))
    return training_memory(sizes, layout, choices[-1], gpu) if choices else None


def workloads(
    layout: Layout, device: Literal["gpu", "cpu"], request: Request
) -> Iterator[Workload]:
    """Recompute none before full; of each, micro-batches from the largest to one sequence."""
    train = request.train
    choices: tuple[Recompute, ...] = (
        ("none", "full") if request.chooses_recompute else (train.recompute,)
    )
    batches = _micro_batch_sizes(layout, device, request)
    for recompute in choices:
        for micro_batch_size in batches:
            yield Workload(
                sequence_length=train.sequence_length,
                micro_batch_size=micro_batch_size,
                num_micro_batches=_num_micro_batches(layout, micro_batch_size, request),
                precision=train.precision,
                recompute=recompute,
                loss_chunk_tokens=train.loss_chunk_tokens,
            )


def _micro_batch_sizes(
    layout: Layout, device: Literal["gpu", "cpu"], request: Request
) -> list[int]:
    """Powers of two up to the target, those first that divide the global batch.

    A micro-batch's tokens are a multiple of TP, and of twice CP, so that every rank gets as many.
    """
    train = request.train
    if train.micro_batch_size is not None:
        sizes = [train.micro_batch_size]
    else:
        largest = max(1, MICRO_BATCH_TARGET_TOKENS[device] // train.sequence_length)
        sizes = [2**power for power in range(largest.bit_length() - 1, -1, -1)]
    split = layout.context_parallel_size
    multiple = layout.tensor_parallel_size * (2 * split if split > 1 else 1)
    sizes = [size for size in sizes if size * train.sequence_length % multiple == 0]
    batch = train.global_batch_tokens or request.typical_batch_tokens
    if batch is None or train.micro_batch_size is not None:
        return sizes
    each = train.sequence_length * layout.data_parallel_size
    within = [size for size in sizes if size * each <= batch] or sizes[-1:]
    return sorted(within, key=lambda size: (batch % (size * each) != 0, -size))


def _num_micro_batches(layout: Layout, micro_batch_size: int, request: Request) -> int:
    """A pipeline's default is one a stage at least: with fewer, stages only wait."""
    train = request.train
    each = train.sequence_length * micro_batch_size * layout.data_parallel_size
    if train.global_batch_tokens is not None:
        return -(-train.global_batch_tokens // each)
    typical = request.typical_batch_tokens or 1
    return max(layout.pipeline_parallel_size, -(-typical // each))
