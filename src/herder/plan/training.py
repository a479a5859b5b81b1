"""Plans a training run: layout, memory, step time, failures, in one frozen record.

Owns the TrainingPlan that later stages run by. Choosing is search's work. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, ContextMethod, LayoutConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.allocated import StateBytes
from herder.plan.candidate import FULL, Candidate, Precision, Recompute, Request
from herder.plan.flops import TRAINING_PASSES, forward_flops_by_module
from herder.plan.layout import DistributionShape, Layout, context_method, smallest_cluster
from herder.plan.memory import MemoryGb, even_state_bytes, training_memory
from herder.plan.naive import NaiveDevice, naive_memory, num_naive_devices, one_driving_device
from herder.plan.parameters import active_parameter_count, parameters_by_module
from herder.plan.pipeline import Schedule
from herder.plan.reliability import Reliability, plan_reliability
from herder.plan.search import (
    Choice,
    ChosenBy,
    Rejected,
    choose_fastest,
    choose_given,
    choose_simplest,
    layout_reason,
    nearest_refusals,
    tokens_per_second,
)
from herder.plan.stages import ModelSizes, RankParameters
from herder.plan.step_time import StepTimeSeconds, peak_flops, simulate_step
from herder.units import GB

Objective = Literal["simplest", "fastest"]
DEFAULT_SEQUENCE_LENGTH = 8_192
"""Or the model's window if that is shorter."""
TYPICAL_GLOBAL_BATCH_TOKENS = 2**22
"""Llama 2's global batch, arXiv:2307.09288, section 2.2; Llama 3 started at it too."""
STATE_BYTES = 16
"""Of one parameter, before anything is shared out."""
FLOPS_CONVENTION = "model FLOPs, 2 a multiply-accumulate, causal attention, recompute not counted"


class PrecisionPlan(Record):
    """Which number format holds what."""

    compute: Precision
    parameters: Precision
    """As they are computed with; autocast keeps them in fp32."""
    gradients: Precision
    """As micro-batches and ranks add them up."""
    optimizer: Literal["fp32"] = "fp32"
    """Moments, and a master copy where parameters are bf16."""


class ModuleShare(Record):
    """One kind of module over the whole model."""

    module: str
    parameters: int
    training_flops_per_token: float
    state_gb: float
    """On one device, by even shares."""


class TrainingPlan(Record):
    """How a model is trained on a cluster. A run directory stores the plan it ran with."""

    model: str
    objective: ChosenBy
    parameters: int
    active_parameters: int
    cluster: ClusterConfig
    """With the device's figures in place of its catalog name."""
    layout: Layout
    distribution_shape: DistributionShape
    layout_reason: str
    """Why this layout and not its neighbours, with the numbers."""
    mesh_axes: dict[str, int]
    layers_per_stage: tuple[int, ...]
    """Of each stage; some schedules have two stages a pipeline rank, one after the other ranks'."""
    pipeline_schedule: Schedule
    context_method: ContextMethod
    """How ranks that share a sequence would attend to it."""
    precision: PrecisionPlan
    recompute: Recompute
    sequence_length: int
    micro_batch_size: int
    micro_batch_tokens: int
    num_micro_batches: int
    global_batch_tokens: int
    memory_gb: MemoryGb
    state_bytes: StateBytes
    """Of the rank with the largest state, what training allocates for it."""
    step_time_seconds: StepTimeSeconds
    tokens_per_second: float
    flops_convention: str
    flops_per_token: float
    peak_tflops_per_gpu: float
    model_flops_utilization: float
    reliability: Reliability
    modules: tuple[ModuleShare, ...]
    rejected: tuple[Rejected, ...]
    adjustments: tuple[str, ...]
    naive_devices: tuple[NaiveDevice, ...] = ()
    """Of a naive layout, what each device of the one process would hold; memory_gb is of a run on
    one device."""


def plan_training(
    architecture: ArchitectureConfig,
    cluster: ClusterConfig,
    train: TrainConfig,
    layout: Literal["auto", "naive"] | LayoutConfig = "auto",
    *,
    model: str = "model",
    objective: Objective = "simplest",
    typical_batch_tokens: int | None = None,
    chooses_recompute: bool = False,
) -> TrainingPlan:
    """The plan of one training run.

    `layout` auto lets `objective` decide, naive is one process that drives all devices. Where
    train.global_batch_tokens is null the batch is `typical_batch_tokens` or, without that, one
    micro-batch a data-parallel rank and stage. Raises PlanError when a given layout is illegal or
    nothing fits, then with the smallest cluster that would do.
    """
    if layout == "naive":
        return _naive(architecture, cluster, train, model)
    sizes = ModelSizes(architecture)
    cluster = cluster.model_copy(update={"gpu": cluster_gpu(cluster)})
    given = LayoutConfig() if layout == "auto" else layout
    request = Request(
        sizes,
        cluster,
        train,
        model,
        typical_batch_tokens,
        chooses_recompute,
        given.pipeline_schedule,
        given.context_method,
    )
    adjustments: list[str] = []
    window = architecture.max_position_embeddings
    if train.sequence_length > window:
        adjustments.append(
            f"sequence_length {train.sequence_length:,} is beyond the {window:,} positions that "
            f"{model} was made for; its position encoding extrapolates."
        )
    if layout == "auto":
        chosen, rejected = choose_simplest(request)
        if objective == "fastest":
            chosen, rejected = _faster(request, chosen, adjustments)
    elif objective == "fastest":
        raise PlanError("objective fastest chooses the layout, but one is given: layout: auto.")
    else:
        chosen, rejected = choose_given(request, layout)
    if chosen is None:
        raise PlanError(_nothing_fits(request))
    adjustments += _adjusted(chosen)
    return _assembled(
        chosen,
        objective=objective if layout == "auto" else "given",
        rejected=tuple(rejected),
        adjustments=tuple(adjustments),
    )


def _adjusted(chosen: Candidate) -> Iterator[str]:
    """What a plan does otherwise than the recipe says."""
    train = chosen.request.train
    asked, planned = train.global_batch_tokens, chosen.global_batch_tokens
    if asked is not None and asked != planned:
        yield (
            f"global_batch_tokens {asked:,} -> {planned:,}: whole micro-batches of "
            f"{chosen.micro_batch_tokens:,} tokens."
        )
    if chosen.num_empty_micro_batches:
        ranks = chosen.layout.data_parallel_size
        yield (
            f"global_batch_tokens {planned:,}: {planned // chosen.micro_batch_tokens:,} "
            f"micro-batches on {ranks:,} data-parallel ranks, of which "
            f"{chosen.num_empty_micro_batches:,} compute an empty one more."
        )
    gradients = chosen.request.gradient_dtype(chosen.layout)
    if train.gradient_dtype not in (None, gradients):
        yield (
            f"gradient_dtype {train.gradient_dtype} -> {gradients}: {chosen.layout.told()} keeps "
            "whole parameters in fp32, and sums their gradients so."
        )


def plan_model_training(
    architecture: ArchitectureConfig,
    cluster: ClusterConfig,
    *,
    model: str,
    sequence_length: int | None = None,
    global_batch_tokens: int | None = None,
    objective: Objective = "simplest",
) -> TrainingPlan:
    """A model without a recipe: usual lengths and batches, recompute where it is needed."""
    length = sequence_length or min(DEFAULT_SEQUENCE_LENGTH, architecture.max_position_embeddings)
    on_cpu = cluster_gpu(cluster).kind == "cpu"
    return plan_training(
        architecture,
        cluster,
        TrainConfig(sequence_length=length, global_batch_tokens=global_batch_tokens),
        model=model,
        objective=objective,
        typical_batch_tokens=None if on_cpu else TYPICAL_GLOBAL_BATCH_TOKENS,
        chooses_recompute=True,
    )


def _naive(
    architecture: ArchitectureConfig, cluster: ClusterConfig, train: TrainConfig, model: str
) -> TrainingPlan:
    one = one_driving_device(architecture, cluster, train)
    plan = plan_training(architecture, one, train, LayoutConfig(), model=model)
    devices = naive_memory(
        plan.memory_gb,
        parameters=plan.parameters,
        hidden_size=architecture.hidden_size,
        micro_batch_tokens=plan.micro_batch_tokens,
        num_devices=num_naive_devices(cluster),
    )
    return plan.model_copy(update={"naive_devices": devices})


def _faster(request: Request, simplest: Candidate | None, adjustments: list[str]) -> Choice:
    """The fastest choice at the simplest plan's global batch, and what it buys over that plan."""
    if simplest is None:
        return choose_fastest(request)
    batch = request.train.global_batch_tokens or simplest.global_batch_tokens
    train = request.train.model_copy(update={"global_batch_tokens": batch})
    fastest, slower = choose_fastest(replace(request, train=train))
    fastest = fastest or simplest
    gain = tokens_per_second(fastest) / tokens_per_second(simplest)
    adjustments.append(
        f"objective fastest: simulated {gain:.2f} x the throughput of the simplest plan, "
        f"{simplest.layout.told()}."
    )
    return fastest, slower


def _nothing_fits(request: Request) -> str:
    cluster, device = request.cluster, request.gpu.name
    told = (
        f"{request.model} does not fit {cluster.nodes} x {cluster.gpus_per_node} {device} in "
        f"sequences of {request.train.sequence_length:,} tokens. {nearest_refusals(request)}\n"
    )
    if not request.chooses_recompute and request.train.recompute == "none":
        told += "Recompute takes less memory: --set train.recompute=full. "
    larger = smallest_cluster(
        cluster,
        STATE_BYTES * request.sizes.whole.total / (request.gpu.memory_gb * GB),
        lambda tried: choose_simplest(replace(request, cluster=tried))[0] is not None,
    )
    nothing = f"No cluster of {device} was found that would do; try devices with more memory."
    return told + (larger or nothing)


def _assembled(
    chosen: Candidate,
    *,
    objective: ChosenBy,
    rejected: tuple[Rejected, ...],
    adjustments: tuple[str, ...],
) -> TrainingPlan:
    request, layout = chosen.request, chosen.layout
    cluster, train, sizes = request.cluster, request.train, request.sizes
    memory, step = training_memory(chosen), simulate_step(chosen)
    states = [chosen.stage_state(stage) for stage in chosen.distinct_stages()]
    modules = _modules(chosen)
    parameters = sum(share.parameters for share in modules)
    flops = sum(share.training_flops_per_token for share in modules)
    stored: Precision = "fp32" if chosen.widths == FULL else "bf16"
    peak = peak_flops(request.gpu, train.precision)
    rate = chosen.global_batch_tokens / step.total
    return TrainingPlan(
        model=request.model,
        objective=objective,
        parameters=parameters,
        active_parameters=active_parameter_count(sizes.architecture),
        cluster=cluster,
        layout=layout,
        distribution_shape=layout.shape(sizes.architecture),
        layout_reason=layout_reason(chosen, rejected, objective),
        mesh_axes=layout.mesh_axes,
        layers_per_stage=sizes.layers_per_stage(layout.pipeline_parallel_size * chosen.chunks),
        pipeline_schedule=chosen.schedule,
        context_method=context_method(sizes.architecture, layout, request.context_method),
        precision=PrecisionPlan(
            compute=train.precision,
            parameters=stored,
            gradients=request.gradient_dtype(layout),
        ),
        recompute=chosen.recompute,
        sequence_length=train.sequence_length,
        micro_batch_size=chosen.micro_batch_size,
        micro_batch_tokens=chosen.micro_batch_tokens,
        num_micro_batches=chosen.num_micro_batches,
        global_batch_tokens=chosen.global_batch_tokens,
        memory_gb=memory,
        state_bytes=max(states, key=lambda state: state.total),
        step_time_seconds=step,
        tokens_per_second=rate,
        flops_convention=FLOPS_CONVENTION,
        flops_per_token=flops,
        peak_tflops_per_gpu=peak / 1e12,
        model_flops_utilization=flops * rate / (peak * layout.num_ranks),
        reliability=plan_reliability(parameters, cluster, step_seconds=step.total),
        modules=modules,
        rejected=rejected,
        adjustments=adjustments,
    )


def _modules(chosen: Candidate) -> tuple[ModuleShare, ...]:
    request = chosen.request
    architecture, length = request.sizes.architecture, request.train.sequence_length
    parameters: dict[str, int] = {**parameters_by_module(architecture)}
    flops: dict[str, float] = {**forward_flops_by_module(architecture, sequence_length=length)}

    def state_gb(name: str) -> float:
        number = float(parameters.get(name, 0))
        is_experts = name == "experts"
        of_module = RankParameters(experts=number) if is_experts else RankParameters(dense=number)
        return even_state_bytes(request, chosen.layout, of_module) / GB

    return tuple(
        ModuleShare(
            module=name,
            parameters=parameters.get(name, 0),
            training_flops_per_token=TRAINING_PASSES * flops.get(name, 0.0),
            state_gb=state_gb(name),
        )
        for name in dict.fromkeys([*parameters, *flops])
    )
