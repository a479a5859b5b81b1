"""What a training plan is asked for, and one way to do it: what pricing and search speak about.

Owns the tokens that a way makes each rank compute and the bytes an element takes there; prices
nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from herder.config.architecture import LayerSpec
from herder.config.catalog import cluster_gpu
from herder.config.run import (
    ClusterConfig,
    ContextMethod,
    GpuConfig,
    PipelineSchedule,
    TrainConfig,
)
from herder.plan.allocated import StateBytes, allocated_state
from herder.plan.layout import Layout
from herder.plan.pipeline import Flight, Schedule, chosen_schedule, chunks_per_rank
from herder.plan.stages import ModelSizes, RankParameters

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
class Request:
    """A model to train on a cluster, and how."""

    sizes: ModelSizes
    cluster: ClusterConfig
    train: TrainConfig
    model: str = "model"
    typical_batch_tokens: int | None = None
    """Global batch to aim at where train.global_batch_tokens is null; None: one micro-batch a
    data-parallel rank and pipeline stage."""
    chooses_recompute: bool = False
    """Whether recompute is the planner's to choose; else train.recompute holds."""
    pipeline_schedule: Literal["auto"] | PipelineSchedule = "auto"
    context_method: Literal["auto"] | ContextMethod = "auto"

    @property
    def gpu(self) -> GpuConfig:
        return cluster_gpu(self.cluster)

    def state_widths(self, layout: Layout) -> StateWidths:
        """Whole parameters are in fp32 under autocast; sharded ones are gathered in bf16 and have
        an fp32 master copy."""
        return FULL if layout.zero_stage == 0 or self.train.precision == "fp32" else MIXED

    def gradient_dtype(self, layout: Layout) -> Precision:
        """In which gradients are accumulated and reduced; whole state knows fp32 alone."""
        asked = self.train.gradient_dtype or self.train.precision
        return "fp32" if layout.zero_stage == 0 else asked


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout, and what each of its ranks computes in a step."""

    request: Request
    layout: Layout
    micro_batch_size: int
    num_micro_batches: int
    recompute: Recompute

    @property
    def schedule(self) -> Schedule:
        """Of the pipeline."""
        ranks = self.layout.pipeline_parallel_size
        return chosen_schedule(self.request.pipeline_schedule, ranks, self.num_micro_batches)

    @property
    def chunks(self) -> int:
        """Stages a pipeline rank; what is said of a stage below is of all that a rank has."""
        return chunks_per_rank(self.schedule)

    def distinct_stages(self) -> tuple[int, ...]:
        """Pipeline ranks of which no two hold the same."""
        return self.request.sizes.distinct_stages(self.layout.pipeline_parallel_size, self.chunks)

    def stage_layers(self, stage: int) -> Counter[LayerSpec]:
        """The kinds of layers of a pipeline stage, and how many of each."""
        ranks = self.layout.pipeline_parallel_size
        return self.request.sizes.stage_layers(ranks, self.chunks)[stage]

    def stage_parameters(self, stage: int) -> RankParameters:
        """Of one rank of a pipeline stage."""
        layout = self.layout
        tp, ep = layout.tensor_parallel_size, layout.expert_parallel_size
        sizes, pp = self.request.sizes, layout.pipeline_parallel_size
        return sizes.stage_on_rank(pp, stage, tp=tp, ep=ep, chunks=self.chunks)

    def micro_batches_in_flight(self, stage: int) -> float:
        """How many micro-batches' activations a pipeline stage keeps at once."""
        ranks = self.layout.pipeline_parallel_size
        return Flight(self.schedule, ranks, stage, self.num_micro_batches).kept

    def stage_state(self, stage: int) -> StateBytes:
        """What the largest rank of a pipeline stage allocates for state."""
        layout = self.layout
        held = self.request.sizes.held_on_rank(
            layout.pipeline_parallel_size,
            stage,
            tp=layout.tensor_parallel_size,
            ep=layout.expert_parallel_size,
            num_shards=layout.num_shards,
            chunks=self.chunks,
        )
        return allocated_state(
            held,
            stage=stage,
            zero_stage=layout.zero_stage,
            compute_bytes=self.compute_bytes,
            gradient_bytes=self.gradient_bytes,
        )

    @property
    def micro_batch_tokens(self) -> int:
        return self.request.train.sequence_length * self.micro_batch_size

    @property
    def global_batch_tokens(self) -> int:
        """What was asked for, in whole micro-batches. Ranks whose share is short of them compute
        empty ones."""
        asked, each = self.request.train.global_batch_tokens, self.micro_batch_tokens
        if asked is not None:
            return -(-asked // each) * each
        return each * self.num_micro_batches * self.layout.data_parallel_size

    @property
    def num_empty_micro_batches(self) -> int:
        """Of a step, on all ranks together."""
        computed = self.num_micro_batches * self.layout.data_parallel_size
        return computed - self.global_batch_tokens // self.micro_batch_tokens

    @property
    def local_tokens(self) -> int:
        """Of a micro-batch, on one context-parallel rank."""
        return self.micro_batch_tokens // self.layout.context_parallel_size

    @property
    def widths(self) -> StateWidths:
        return self.request.state_widths(self.layout)

    @property
    def gradient_bytes(self) -> int:
        """Of a number that is reduced."""
        return 4 if self.request.gradient_dtype(self.layout) == "fp32" else 2

    @property
    def residual_bytes(self) -> int:
        """Of an element of the residual stream, fp32 under autocast of fp32 parameters."""
        return self.widths.parameter

    @property
    def compute_bytes(self) -> int:
        """Of an element of what is computed from the residual stream."""
        return 2 if self.request.train.precision == "bf16" else 4
