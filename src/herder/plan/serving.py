"""Plans serving: how weights split, in which format, and how many sequences the cache holds.

Owns the ServingPlan and its fallbacks: bf16, then fp8, then pipeline stages. The budget is a share
of each GPU's memory; what it leaves is the engine's own (activations, graphs, communicators).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from herder.config.architecture import ArchitectureConfig, LatentAttention
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, GpuConfig
from herder.errors import PlanError
from herder.plan.flops import key_value_elements, kv_bytes_per_sequence
from herder.plan.layout import (
    divisors,
    legal_tensor_degrees,
    smallest_cluster,
    tensor_degree_problem,
)
from herder.plan.parameters import active_parameter_count, parameter_count
from herder.plan.stages import ModelSizes
from herder.units import GB

DEFAULT_UTILIZATION = 0.85
"""Share of a GPU's memory for weights and cache."""
DEFAULT_CONTEXT_TOKENS = 8_192
"""Or the model's window if that is shorter."""
RULE_MEMORY_SHARE = 0.6
"""Of the quick rule: weights fill three fifths of the GPUs, cache and activations the rest."""
LONG_CONTEXT_TOKENS = 32_768
"""From here on the quick rule counts one sequence's cache too."""

Dtype = Literal["bf16", "fp8"]
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}
DistributionShape = Literal[
    "single-GPU dense",
    "single-GPU MoE",
    "TP dense",
    "TP MoE",
    "DP attention + EP MoE",
    "MLA + MoE",
]


class ServingLayout(Record):
    """How one copy of the model is split, and how many copies the cluster holds."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    """Replicas that answer independently."""


class ServingPlan(Record):
    """How a model is served on a cluster."""

    model: str
    parameters: int
    active_parameters: int
    cluster: ClusterConfig
    layout: ServingLayout
    distribution_shape: DistributionShape
    weight_dtype: Dtype
    kv_cache_dtype: Dtype
    context_tokens: int
    utilization: float
    budget_gb_per_gpu: float
    """utilization x memory."""
    weights_gb_per_gpu: float
    kv_cache_gb_per_gpu: float
    """What the budget leaves for keys and values."""
    kv_bytes_per_token_per_gpu: float
    kv_gb_per_sequence_per_gpu: float
    """Of one sequence of context_tokens; layers with a window keep no more than that."""
    max_concurrent_sequences: int
    """Of context_tokens each, on one replica."""
    max_concurrent_sequences_bf16_ends: int
    """The same when fp8 weights keep embedding and head in bf16, as most checkpoints do."""
    decode_tokens_per_second_limit: float
    """For one sequence: the weights it meets, read once a token at the full memory bandwidth."""
    gpus_needed_rule: int
    """ceil(weight bytes / (0.6 x memory)), with one sequence's cache where the context is long."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Request:
    """What a serving plan is asked for."""

    sizes: ModelSizes
    cluster: ClusterConfig
    model: str
    context_tokens: int
    tensor_parallel_size: int | None
    utilization: float

    @property
    def gpu(self) -> GpuConfig:
        return cluster_gpu(self.cluster)

    @property
    def budget_bytes(self) -> float:
        return self.utilization * self.gpu.memory_gb * GB

    @property
    def budget_told(self) -> str:
        share = f"{self.utilization:.0%} of {self.gpu.memory_gb:g} GB"
        return f"{self.budget_bytes / GB:.1f} GB may be filled ({share})"


@dataclass(frozen=True, slots=True)
class _Fit:
    """Bytes on the fullest GPU of one way to split the model."""

    tp: int
    pp: int
    dtype: Dtype
    weights: float
    ends: float
    """Parameters of the embedding or head on that GPU."""
    sequence: float
    budget: float

    @property
    def taken(self) -> float:
        """By the weights and one sequence."""
        return self.weights + self.sequence

    def num_sequences(self, *, extra_bytes: float = 0.0) -> int:
        """How many the budget holds beside the weights."""
        return max(0, int((self.budget - self.weights - extra_bytes) // self.sequence))

    @property
    def num_sequences_bf16_ends(self) -> int:
        return self.num_sequences(extra_bytes=self.ends * (2 - DTYPE_BYTES[self.dtype]))


def gpus_needed(weight_bytes: float, memory_bytes: float, kv_cache_bytes: float = 0.0) -> int:
    """The quick rule: GPUs whose memory the weights (and a long context's cache) fill to 60 %."""
    return ceil((weight_bytes + kv_cache_bytes) / (RULE_MEMORY_SHARE * memory_bytes))


def plan_serving(
    architecture: ArchitectureConfig,
    cluster: ClusterConfig,
    *,
    model: str = "model",
    context_tokens: int | None = None,
    tensor_parallel_size: int | None = None,
    utilization: float = DEFAULT_UTILIZATION,
) -> ServingPlan:
    """The plan of serving one model.

    Without `tensor_parallel_size` the smallest legal degree at which weights and one sequence of
    `context_tokens` fit. Raises PlanError when the degree given is illegal, or when nothing fits,
    then with the smallest cluster that would do.
    """
    context = context_tokens or min(DEFAULT_CONTEXT_TOKENS, architecture.max_position_embeddings)
    sizes = ModelSizes(architecture)
    request = _Request(sizes, cluster, model, context, tensor_parallel_size, utilization)
    _check_degree(request)
    refused: list[_Fit] = []
    for fit in _ways(request):
        if fit.taken <= fit.budget:
            return _assembled(request, fit, refused)
        refused.append(fit)
    raise PlanError(_nothing_fits(request, refused))


def _check_degree(request: _Request) -> None:
    given, cluster = request.tensor_parallel_size, request.cluster
    architecture = request.sizes.architecture
    legal = legal_tensor_degrees(architecture, cluster, copies_kv_heads=False)
    if given is not None and given not in legal:
        problem = tensor_degree_problem(architecture, given, copies_kv_heads=False)
        where = f"{cluster.nodes} x {cluster.gpus_per_node} GPUs"
        raise PlanError(
            f"--tensor-parallel {given} {problem or f'does not divide a node of {where}'} "
            f"({request.model}). Legal here: {', '.join(map(str, legal))}. "
            f"Try --tensor-parallel {legal[-1]}, or leave it out."
        )


def _ways(request: _Request) -> Iterator[_Fit]:
    """bf16 by TP, fp8 by TP where the GPU has it, then pipeline stages in the last format."""
    architecture, num_gpus = request.sizes.architecture, request.cluster.num_gpus
    degrees = [
        degree
        for degree in legal_tensor_degrees(architecture, request.cluster, copies_kv_heads=False)
        if request.tensor_parallel_size in (None, degree)
    ]
    dtypes: tuple[Dtype, ...] = ("bf16", "fp8") if request.gpu.fp8_tflops else ("bf16",)
    for dtype in dtypes:
        for tp in degrees:
            yield _fit(request, tp, 1, dtype)
    for pp in divisors(num_gpus)[1:]:
        for tp in degrees:
            if tp * pp <= num_gpus and pp <= architecture.num_layers:
                yield _fit(request, tp, pp, dtypes[-1])


def _fit(request: _Request, tp: int, pp: int, dtype: Dtype) -> _Fit:
    """The stage whose weights and one sequence take most."""
    sizes, width = request.sizes, DTYPE_BYTES[dtype]
    stages = (
        _Fit(
            tp=tp,
            pp=pp,
            dtype=dtype,
            weights=sizes.stage_on_rank(pp, stage, tp=tp, ep=1).total * width,
            ends=sizes.ends_of_stage(pp, stage, tp=tp),
            sequence=kv_bytes_per_sequence(
                sizes.architecture,
                layers=sizes.stage_layers(pp)[stage],
                num_tokens=request.context_tokens,
                bytes_per_element=width,
                tensor_parallel_size=tp,
            ),
            budget=request.budget_bytes,
        )
        for stage in sizes.distinct_stages(pp)
    )
    return max(stages, key=lambda fit: fit.taken)


def _assembled(request: _Request, fit: _Fit, refused: list[_Fit]) -> ServingPlan:
    sizes, cluster, gpu = request.sizes, request.cluster, request.gpu
    architecture, context = sizes.architecture, request.context_tokens
    active = active_parameter_count(architecture)
    width = DTYPE_BYTES[fit.dtype]
    long_cache = fit.sequence * fit.tp * fit.pp if context > LONG_CONTEXT_TOKENS else 0.0
    bandwidth = gpu.memory_bandwidth_gb_per_second * GB * fit.tp
    elements = key_value_elements(architecture, tensor_parallel_size=fit.tp)
    return ServingPlan(
        model=request.model,
        parameters=parameter_count(architecture),
        active_parameters=active,
        cluster=cluster.model_copy(update={"gpu": gpu}),
        layout=ServingLayout(
            tensor_parallel_size=fit.tp,
            pipeline_parallel_size=fit.pp,
            data_parallel_size=cluster.num_gpus // (fit.tp * fit.pp),
        ),
        distribution_shape=distribution_shape(architecture, fit.tp, fit.pp),
        weight_dtype=fit.dtype,
        kv_cache_dtype=fit.dtype,
        context_tokens=context,
        utilization=request.utilization,
        budget_gb_per_gpu=fit.budget / GB,
        weights_gb_per_gpu=fit.weights / GB,
        kv_cache_gb_per_gpu=(fit.budget - fit.weights) / GB,
        kv_bytes_per_token_per_gpu=max(sizes.layers_per_stage(fit.pp)) * elements * width,
        kv_gb_per_sequence_per_gpu=fit.sequence / GB,
        max_concurrent_sequences=fit.num_sequences(),
        max_concurrent_sequences_bf16_ends=fit.num_sequences_bf16_ends,
        decode_tokens_per_second_limit=bandwidth / (active * width),
        gpus_needed_rule=gpus_needed(sizes.whole.total * width, gpu.memory_gb * GB, long_cache),
        notes=tuple(_notes(request, fit, refused)),
    )


def distribution_shape(architecture: ArchitectureConfig, tp: int, pp: int) -> DistributionShape:
    """The name of how such a model is spread over GPUs.

    Experts beyond what TP reaches (one key-value head a rank) are spread by expert parallelism,
    with attention replicated; MLA's one latent makes that the rule.
    """
    is_moe = architecture.moe is not None
    if tp * pp == 1:
        return "single-GPU MoE" if is_moe else "single-GPU dense"
    if not is_moe:
        return "TP dense"
    if isinstance(architecture.attention, LatentAttention):
        return "MLA + MoE"
    return "TP MoE" if pp == 1 else "DP attention + EP MoE"


def _notes(request: _Request, fit: _Fit, refused: list[_Fit]) -> Iterator[str]:
    architecture, context = request.sizes.architecture, request.context_tokens
    widest = {(way.dtype, way.pp): way for way in refused}
    widest.pop((fit.dtype, fit.pp), None)
    for (dtype, pp), way in widest.items():
        stages = f", {pp} stages" if pp > 1 else ""
        yield (
            f"{dtype} is a wall: {way.weights / GB:.1f} GB of weights a GPU at TP {way.tp}{stages} "
            f"and {way.sequence / GB:.1f} GB for one sequence, {request.budget_told}."
        )
    if fit.dtype == "fp8":
        yield (
            f"fp8 weights and cache: {fit.num_sequences()} sequences with every parameter at one "
            f"byte; {fit.num_sequences_bf16_ends} when embedding and head stay in bf16."
        )
    if context > architecture.max_position_embeddings:
        yield (
            f"{context:,} tokens are beyond the {architecture.max_position_embeddings:,} positions "
            f"that {request.model} was made for."
        )
    if any(layer.window is not None and layer.window < context for layer in architecture.layers):
        yield "Layers with a window keep only that many tokens of a sequence."
    if isinstance(architecture.attention, LatentAttention) and fit.tp > 1:
        yield (
            "MLA's latent is one key-value head: each tensor-parallel rank keeps a copy. "
            "Data-parallel attention saves that memory."
        )
    num_gpus, size = request.cluster.num_gpus, fit.tp * fit.pp
    replicas, left = divmod(num_gpus, size)
    if replicas > 1:
        gpus = "1 GPU" if size == 1 else f"{size} GPUs"
        yield f"{replicas} replicas of {gpus} each; sequences are counted for one."
    if left:
        yield f"{left} of {num_gpus} GPUs stay unused."


def _nothing_fits(request: _Request, refused: list[_Fit]) -> str:
    cluster, gpu = request.cluster, request.gpu
    best = min(refused, key=lambda fit: fit.taken)
    larger = smallest_cluster(
        cluster,
        request.sizes.whole.total * DTYPE_BYTES[best.dtype] / request.budget_bytes,
        lambda tried: any(w.taken <= w.budget for w in _ways(replace(request, cluster=tried))),
    )
    return (
        f"{request.model} does not fit {cluster.nodes} x {cluster.gpus_per_node} {gpu.name}: at "
        f"best {best.weights / GB:.1f} GB of {best.dtype} weights (TP {best.tp}, PP {best.pp}) and "
        f"{best.sequence / GB:.2f} GB for one sequence of {request.context_tokens:,} tokens a GPU, "
        f"{request.budget_told}.\n"
    ) + (larger or f"No cluster of {gpu.name} was found that would do; a shorter --context may.")
