"""Bytes on a device in training: state by the 16N rule, activations, logits, buffers, overhead.

Owns which bytes count and on which pipeline stage they peak; decides nothing. `state` is the rule
with even shares; `largest_rank_state` follows real shards: embedding and head on the ends, uneven
stages, key-value heads copied where tensor parallelism exceeds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from herder.config.record import Record
from herder.config.run import GpuConfig
from herder.plan.activations import (
    Widths,
    checkpoint_bytes_per_token,
    gradient_bytes_per_token,
    layer_bytes_per_token,
    logit_bytes,
)
from herder.plan.layout import Layout
from herder.plan.stages import ModelSizes, RankParameters
from herder.units import GB, GIB

GPU_MEMORY_SHARE = 0.92
"""How much of a GPU's nominal memory a plan may fill: the rest is the allocator's fragmentation."""
CPU_MEMORY_SHARE = 0.7
"""Of a CPU's memory, which the operating system, page cache and other processes share."""
ONE_RANK_OVERHEAD_BYTES = round(0.25 * GIB)
"""Device context and workspaces. Source: vLLM logs on H100 at TP 1, llm-d-planner PR 205."""
MANY_RANKS_OVERHEAD_BYTES = round(2.1 * GIB)
"""The same with the collectives' buffers: at TP 2 and up in those logs."""
CPU_OVERHEAD_BYTES = round(0.5 * GB)
"""Resident size of a process that has imported torch and read a tokenizer."""
BLOCKS_IN_FLIGHT = 2
"""Blocks whose parameters are gathered or gradients reduced at once: this one and its neighbour."""

STATE_BYTES = 16
"""Of one parameter, before anything is shared out."""

Recompute = Literal["none", "full"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class StateWidths:
    """Bytes that training keeps of each parameter. They sum to 16."""

    parameter: int
    gradient: int
    optimizer: int


MIXED = StateWidths(parameter=2, gradient=2, optimizer=12)
"""bf16 parameters and gradients; fp32 master copy and two moments in the optimizer.
Source: ZeRO, arXiv:1910.02054, section 3.1."""
FULL = StateWidths(parameter=4, gradient=4, optimizer=8)
"""fp32 parameters (autocast to bf16 as they are used), fp32 gradients and two moments."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What one optimizer step computes on each rank."""

    sequence_length: int
    micro_batch_size: int
    num_micro_batches: int
    precision: Precision
    recompute: Recompute
    loss_chunk_tokens: int

    @property
    def micro_batch_tokens(self) -> int:
        return self.sequence_length * self.micro_batch_size


class MemoryGb(Record):
    """GB (1e9 bytes) on the fullest device, part by part."""

    state: float
    """Parameters, gradients and optimizer state by the 16N rule, even shares N / (TP PP)."""
    largest_rank_state: float
    """The same of the rank that holds most."""
    activations: float
    logits: float
    buffers: float
    """Gathered parameters, gradients being reduced, or the copies that autocast keeps."""
    overhead: float
    """Device context, libraries, communicators."""
    total: float
    """largest_rank_state and everything below it, on the stage where the sum peaks."""
    budget: float
    """What a plan may fill of the device."""
    device: float


def state_widths(layout: Layout, precision: Precision) -> StateWidths:
    """One rank keeps fp32 parameters under autocast; several keep bf16 ones and an fp32 master."""
    return FULL if layout.num_ranks == 1 or precision == "fp32" else MIXED


def state_bytes(parameters: RankParameters, layout: Layout, widths: StateWidths) -> float:
    """The 16N rule: what a rank keeps of `parameters` after ZeRO shares out its part.

    Over P ranks with bf16 parameters: stage 0 16N, stage 1 12N/P + 4N, stage 2 14N/P + 2N, stage 3
    16N/P. Experts are shared out over the P / EP ranks that hold the same ones.
    """
    dense_shards = layout.num_shards
    expert_shards = layout.num_shards // layout.expert_parallel_size
    total = 0.0
    for stage, width in ((3, widths.parameter), (2, widths.gradient), (1, widths.optimizer)):
        shared = layout.zero_stage >= stage
        total += width * parameters.dense / (dense_shards if shared else 1)
        total += width * parameters.experts / (expert_shards if shared else 1)
    return total


def even_share(sizes: ModelSizes, layout: Layout) -> RankParameters:
    """N / (TP PP), experts also over EP."""
    whole = sizes.whole
    ways = layout.tensor_parallel_size * layout.pipeline_parallel_size
    return RankParameters(whole.dense / ways, whole.experts / ways / layout.expert_parallel_size)


def memory_budget_bytes(gpu: GpuConfig) -> float:
    """What a training plan may fill of one device."""
    share = CPU_MEMORY_SHARE if gpu.kind == "cpu" else GPU_MEMORY_SHARE
    return gpu.memory_gb * GB * share


def training_memory(
    sizes: ModelSizes, layout: Layout, workload: Workload, gpu: GpuConfig
) -> MemoryGb:
    """The parts on the device that fills most, over all pipeline stages."""
    widths = state_widths(layout, workload.precision)
    stages = [
        _stage_bytes(sizes, layout, workload, widths, stage)
        for stage in sizes.distinct_stages(layout.pipeline_parallel_size)
    ]
    fullest = max(stages, key=sum)
    overhead = _overhead_bytes(layout, gpu)
    return MemoryGb(
        state=state_bytes(even_share(sizes, layout), layout, widths) / GB,
        largest_rank_state=max(state for state, *_ in stages) / GB,
        activations=fullest[1] / GB,
        logits=fullest[2] / GB,
        buffers=fullest[3] / GB,
        overhead=overhead / GB,
        total=(sum(fullest) + overhead) / GB,
        budget=memory_budget_bytes(gpu) / GB,
        device=gpu.memory_gb,
    )


def _stage_bytes(
    sizes: ModelSizes, layout: Layout, workload: Workload, widths: StateWidths, stage: int
) -> tuple[float, float, float, float]:
    """State, activations, logits and buffers of one stage's rank."""
    tp, pp = layout.tensor_parallel_size, layout.pipeline_parallel_size
    parameters = sizes.stage_on_rank(pp, stage, tp=tp, ep=layout.expert_parallel_size)
    is_last = stage == pp - 1
    bytes_each = activation_widths(layout, workload.precision)
    logits = logit_bytes(
        sizes.architecture,
        chunk_tokens=min(workload.loss_chunk_tokens, _local_tokens(layout, workload)),
        tp=tp,
        widths=bytes_each,
    )
    return (
        state_bytes(parameters, layout, widths),
        _activation_bytes(sizes, layout, workload, bytes_each, stage),
        logits if is_last else 0.0,
        _buffer_bytes(sizes, layout, workload, parameters, widths),
    )


def activation_widths(layout: Layout, precision: Precision) -> Widths:
    """The residual stream stays fp32 under autocast of fp32 parameters."""
    compute = 2 if precision == "bf16" else 4
    return Widths(residual=state_widths(layout, precision).parameter, compute=compute)


def _local_tokens(layout: Layout, workload: Workload) -> int:
    return workload.micro_batch_tokens // layout.context_parallel_size


def _activation_bytes(
    sizes: ModelSizes, layout: Layout, workload: Workload, widths: Widths, stage: int
) -> float:
    """Of the micro-batches in flight (1F1B keeps stages - stage of them), and one layer at work.

    Source: PipeDream-Flush schedule, Narayanan et al., arXiv:2104.04473, section 2.2.1.
    """
    architecture, tp = sizes.architecture, layout.tensor_parallel_size
    tokens = _local_tokens(layout, workload)
    in_flight = min(workload.num_micro_batches, layout.pipeline_parallel_size - stage)
    layers = sizes.stage_layers(layout.pipeline_parallel_size)[stage]
    each = {
        layer: layer_bytes_per_token(architecture, layer, tp=tp, widths=widths) for layer in layers
    }
    at_work = max(
        gradient_bytes_per_token(architecture, layer, tp=tp, widths=widths) for layer in layers
    )
    if workload.recompute == "full":
        kept = checkpoint_bytes_per_token(architecture, tp=tp, widths=widths) * layers.total()
        at_work += max(each.values())
    else:
        kept = sum(each[layer] * times for layer, times in layers.items())
    ends = 0.0
    if stage == layout.pipeline_parallel_size - 1:
        ends = 2 * architecture.hidden_size * (widths.residual + widths.compute)
    return tokens * (kept * in_flight + at_work + ends)


def _buffer_bytes(
    sizes: ModelSizes,
    layout: Layout,
    workload: Workload,
    parameters: RankParameters,
    widths: StateWidths,
) -> float:
    """What exists beside state and activations while a step runs."""
    if layout.num_ranks == 1:
        return 2 * parameters.total if workload.precision == "bf16" else 0.0
    tp, ep = layout.tensor_parallel_size, layout.expert_parallel_size
    block = max(sizes.layer_on_rank(layer, tp=tp, ep=ep).total for layer in sizes.kinds)
    if layout.num_shards == 1:
        return 0.0
    reduced = BLOCKS_IN_FLIGHT * block * widths.gradient
    if layout.zero_stage < 3:
        return reduced
    gathered = max(BLOCKS_IN_FLIGHT * block, block + sizes.ends_on_rank(tp=tp))
    return reduced + gathered * widths.parameter


def _overhead_bytes(layout: Layout, gpu: GpuConfig) -> int:
    if gpu.kind == "cpu":
        return CPU_OVERHEAD_BYTES
    return ONE_RANK_OVERHEAD_BYTES if layout.num_ranks == 1 else MANY_RANKS_OVERHEAD_BYTES
