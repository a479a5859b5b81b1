"""Plans a training run: layout, memory, step time, failures, in one frozen record.

Owns the TrainingPlan that later stages run by. Choosing is search's work. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, LayoutConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.candidates import Fit, Request
from herder.plan.flops import TRAINING_PASSES, forward_flops_by_module
from herder.plan.layout import Layout, cluster_flags
from herder.plan.memory import FULL, MemoryGb, Precision, Recompute, state_widths
from herder.plan.parameters import active_parameter_count, parameters_by_module
from herder.plan.reliability import Reliability, plan_reliability
from herder.plan.search import (
    Choice,
    Rejected,
    choose_fastest,
    choose_given,
    choose_simplest,
    nearest_refusals,
    smallest_cluster,
    tokens_per_second,
)
from herder.plan.stages import ModelSizes
from herder.plan.step_time import StepTimeSeconds, hardware, simulate_step

Objective = Literal["simplest", "fastest"]
DEFAULT_SEQUENCE_LENGTH = 8_192
"""Or the model's window if that is shorter."""
TYPICAL_GLOBAL_BATCH_TOKENS = 2**22
"""Llama 2's global batch, arXiv:2307.09288, section 2.2; Llama 3 started at it too."""
FLOPS_CONVENTION = "model FLOPs, 2 a multiply-accumulate, causal attention, recompute not counted"


class PrecisionPlan(Record):
    """Which number format holds what."""

    compute: Precision
    parameters: Precision
    gradients: Precision
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
    objective: Literal["simplest", "fastest", "given"]
    parameters: int
    active_parameters: int
    cluster: ClusterConfig
    """With the device's figures in place of its catalog name."""
    layout: Layout
    mesh_axes: dict[str, int]
    layers_per_stage: tuple[int, ...]
    pipeline_schedule: Literal["none", "1f1b"]
    precision: PrecisionPlan
    recompute: Recompute
    sequence_length: int
    micro_batch_size: int
    micro_batch_tokens: int
    num_micro_batches: int
    global_batch_tokens: int
    memory_gb: MemoryGb
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


def plan_training(
    architecture: ArchitectureConfig,
    cluster: ClusterConfig,
    train: TrainConfig,
    layout: Literal["auto"] | LayoutConfig = "auto",
    *,
    model: str = "model",
    objective: Objective = "simplest",
    typical_batch_tokens: int | None = None,
    chooses_recompute: bool = False,
) -> TrainingPlan:
    """The plan of one training run.

    `layout` auto lets `objective` decide. Where train.global_batch_tokens is null the batch is
    `typical_batch_tokens` or, without that, one micro-batch a data-parallel rank and stage.
    Raises PlanError when a given layout is illegal or nothing fits, then with the smallest cluster
    that would do.
    """
    adjustments: list[str] = []
    train = _within_window(train, architecture, model, adjustments)
    request = Request(train, typical_batch_tokens, chooses_recompute)
    sizes = ModelSizes(architecture)
    if layout != "auto":
        if objective == "fastest":
            raise PlanError("objective fastest chooses the layout, but one is given: layout: auto.")
        choice: Choice | None = choose_given(sizes, cluster, request, layout, model)
    else:
        choice = choose_simplest(sizes, cluster, request)
        if objective == "fastest":
            choice = _faster(sizes, cluster, request, choice, adjustments)
    if choice is None:
        raise PlanError(_nothing_fits(sizes, cluster, request, model))
    adjustments += _told_batch(train, choice.fit)
    return _assembled(
        sizes,
        cluster,
        choice,
        model=model,
        objective=objective if layout == "auto" else "given",
        adjustments=tuple(adjustments),
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


def _within_window(
    train: TrainConfig, architecture: ArchitectureConfig, model: str, adjustments: list[str]
) -> TrainConfig:
    window = architecture.max_position_embeddings
    if train.sequence_length > window:
        adjustments.append(
            f"sequence_length {train.sequence_length:,} is beyond the {window:,} positions that "
            f"{model} was made for; its position encoding extrapolates."
        )
    return train


def _told_batch(train: TrainConfig, fit: Fit) -> list[str]:
    """Tells when whole micro-batches make the global batch larger than asked for."""
    asked = train.global_batch_tokens
    if asked is None or asked == fit.global_batch_tokens:
        return []
    return [
        f"global_batch_tokens {asked:,} -> {fit.global_batch_tokens:,}: whole micro-batches of "
        f"{fit.workload.micro_batch_tokens:,} tokens on {fit.layout.data_parallel_size} ranks."
    ]


def _faster(
    sizes: ModelSizes,
    cluster: ClusterConfig,
    request: Request,
    simplest: Choice | None,
    adjustments: list[str],
) -> Choice | None:
    """The fastest choice at the simplest plan's global batch, and what it buys over that plan."""
    if simplest is None:
        return choose_fastest(sizes, cluster, request)
    batch = request.train.global_batch_tokens or simplest.fit.global_batch_tokens
    train = request.train.model_copy(update={"global_batch_tokens": batch})
    fastest = choose_fastest(sizes, cluster, replace(request, train=train)) or simplest
    rates = [tokens_per_second(sizes, cluster, choice.fit) for choice in (fastest, simplest)]
    adjustments.append(
        f"objective fastest: simulated {rates[0] / rates[1]:.2f} x the throughput of the simplest "
        f"plan, {simplest.fit.layout.told()}."
    )
    return fastest


def _nothing_fits(sizes: ModelSizes, cluster: ClusterConfig, request: Request, model: str) -> str:
    device = cluster_gpu(cluster).name
    refused = nearest_refusals(sizes, cluster, request)
    told = "\n".join(f"  {entry.layout}: {entry.reason}" for entry in refused[:3])
    head = (
        f"{model} does not fit {cluster.nodes} x {cluster.gpus_per_node} {device} in sequences of "
        f"{request.train.sequence_length:,} tokens. Nearest of {len(refused)} layouts:\n{told}\n"
    )
    if not request.chooses_recompute and request.train.recompute == "none":
        head += "Recompute takes less memory: --set train.recompute=full. "
    larger = smallest_cluster(sizes, cluster, request)
    if larger is None:
        return (
            head + f"No cluster of {device} was found that would do; try devices with more memory."
        )
    return head + (f"Smallest cluster that would do: {cluster_flags(larger)}.")


def _assembled(
    sizes: ModelSizes,
    cluster: ClusterConfig,
    choice: Choice,
    *,
    model: str,
    objective: Literal["simplest", "fastest", "given"],
    adjustments: tuple[str, ...],
) -> TrainingPlan:
    architecture, layout, workload = sizes.architecture, choice.fit.layout, choice.fit.workload
    modules = _modules(architecture, choice.fit)
    flops = sum(share.training_flops_per_token for share in modules)
    step = simulate_step(sizes, layout, workload, cluster)
    batch = choice.fit.global_batch_tokens
    rates = hardware(cluster, workload)
    parameters = sum(share.parameters for share in modules)
    stages = layout.pipeline_parallel_size
    return TrainingPlan(
        model=model,
        objective=objective,
        parameters=parameters,
        active_parameters=active_parameter_count(architecture),
        cluster=cluster.model_copy(update={"gpu": rates.gpu}),
        layout=layout,
        mesh_axes=layout.mesh_axes,
        layers_per_stage=sizes.layers_per_stage(stages),
        pipeline_schedule="1f1b" if stages > 1 else "none",
        precision=_precision(layout, workload.precision),
        recompute=workload.recompute,
        sequence_length=workload.sequence_length,
        micro_batch_size=workload.micro_batch_size,
        micro_batch_tokens=workload.micro_batch_tokens,
        num_micro_batches=workload.num_micro_batches,
        global_batch_tokens=batch,
        memory_gb=choice.fit.memory,
        step_time_seconds=step,
        tokens_per_second=batch / step.total,
        flops_convention=FLOPS_CONVENTION,
        flops_per_token=flops,
        peak_tflops_per_gpu=rates.peak_flops / 1e12,
        model_flops_utilization=flops * batch / (step.total * rates.peak_flops * layout.num_ranks),
        reliability=plan_reliability(parameters, cluster, step_seconds=step.total),
        modules=modules,
        rejected=choice.rejected,
        adjustments=adjustments,
    )


def _precision(layout: Layout, compute: Precision) -> PrecisionPlan:
    widths = state_widths(layout, compute)
    stored: Precision = "fp32" if widths == FULL else "bf16"
    return PrecisionPlan(compute=compute, parameters=stored, gradients=stored)


def _modules(architecture: ArchitectureConfig, fit: Fit) -> tuple[ModuleShare, ...]:
    parameters: dict[str, int] = {**parameters_by_module(architecture)}
    flops: dict[str, float] = {
        **forward_flops_by_module(architecture, sequence_length=fit.workload.sequence_length)
    }
    bytes_each = fit.memory.state / sum(parameters.values())
    return tuple(
        ModuleShare(
            module=name,
            parameters=parameters.get(name, 0),
            training_flops_per_token=TRAINING_PASSES * flops.get(name, 0.0),
            state_gb=bytes_each * parameters.get(name, 0),
        )
        for name in dict.fromkeys([*parameters, *flops])
    )
