"""Plans serving: how weights split, in which format, and how many sequences the cache holds.

Owns the ServingPlan and its fallbacks: bf16, then fp8, then pipeline stages. The budget is a share
of each GPU's memory; what it leaves is the engine's own (activations, graphs, communicators).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig
from herder.errors import PlanError
from herder.plan.flops import key_value_elements, kv_bytes_per_token
from herder.plan.layout import (
    cluster_flags,
    divisors,
    growing_clusters,
    legal_tensor_degrees,
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
    def is_enough(self) -> bool:
        return self.weights + self.sequence <= self.budget

    @property
    def num_sequences(self) -> int:
        return max(0, int((self.budget - self.weights) // self.sequence))

    @property
    def num_sequences_bf16_ends(self) -> int:
        extra = self.ends * (DTYPE_BYTES["bf16"] - DTYPE_BYTES[self.dtype])
        return max(0, int((self.budget - self.weights - extra) // self.sequence))


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
    window = architecture.max_position_embeddings
    context = context_tokens or min(DEFAULT_CONTEXT_TOKENS, window)
    sizes = ModelSizes(architecture)
    degrees = _degrees(architecture, cluster, tensor_parallel_size, model)
    refused: list[_Fit] = []
    for fit in _ways(sizes, cluster, degrees, context, utilization):
        if fit.is_enough:
            return _assembled(sizes, cluster, fit, refused, model, context, utilization)
        refused.append(fit)
    raise PlanError(
        _nothing_fits(sizes, cluster, refused, model, context, tensor_parallel_size, utilization)
    )


def legal_serving_degrees(
    architecture: ArchitectureConfig, cluster: ClusterConfig
) -> tuple[int, ...]:
    """Degrees that divide query heads, key-value heads and vocabulary, inside the fast domain."""
    return legal_tensor_degrees(architecture, cluster, copies_kv_heads=False)


def _degrees(
    architecture: ArchitectureConfig, cluster: ClusterConfig, given: int | None, model: str
) -> tuple[int, ...]:
    legal = legal_serving_degrees(architecture, cluster)
    if given is None or given in legal:
        return legal if given is None else (given,)
    problem = tensor_degree_problem(architecture, given, copies_kv_heads=False)
    where = f"{cluster.nodes} x {cluster.gpus_per_node} GPUs"
    reason = problem or f"does not divide a node of {where}"
    raise PlanError(
        f"--tensor-parallel {given} {reason} ({model}). Legal here: "
        f"{', '.join(map(str, legal))}. Try --tensor-parallel {legal[-1]}, or leave it out."
    )


def _ways(
    sizes: ModelSizes,
    cluster: ClusterConfig,
    degrees: tuple[int, ...],
    context: int,
    utilization: float,
) -> Iterator[_Fit]:
    """bf16 by TP, fp8 by TP where the GPU has it, then pipeline stages in the last format."""
    gpu = cluster_gpu(cluster)
    dtypes: tuple[Dtype, ...] = ("bf16", "fp8") if gpu.fp8_tflops is not None else ("bf16",)
    budget = utilization * gpu.memory_gb * GB
    for dtype in dtypes:
        for tp in degrees:
            yield _fit(sizes, tp, 1, dtype, context, budget)
    for pp in divisors(cluster.num_gpus)[1:]:
        for tp in degrees:
            if tp * pp <= cluster.num_gpus and pp <= sizes.architecture.num_layers:
                yield _fit(sizes, tp, pp, dtypes[-1], context, budget)


def _fit(sizes: ModelSizes, tp: int, pp: int, dtype: Dtype, context: int, budget: float) -> _Fit:
    """The stage whose weights and one sequence take most."""
    width = DTYPE_BYTES[dtype]
    elements = key_value_elements(sizes.architecture, tensor_parallel_size=tp)
    stages: list[_Fit] = []
    for stage in sizes.distinct_stages(pp):
        layers = sizes.stage_layers(pp)[stage]
        kept = sum(n * min(context, layer.window or context) for layer, n in layers.items())
        stages.append(
            _Fit(
                tp=tp,
                pp=pp,
                dtype=dtype,
                weights=sizes.stage_on_rank(pp, stage, tp=tp, ep=1).total * width,
                ends=sizes.ends_of_stage(pp, stage, tp=tp),
                sequence=kept * elements * width,
                budget=budget,
            )
        )
    return max(stages, key=lambda fit: fit.weights + fit.sequence)


def _assembled(
    sizes: ModelSizes,
    cluster: ClusterConfig,
    fit: _Fit,
    refused: list[_Fit],
    model: str,
    context: int,
    utilization: float,
) -> ServingPlan:
    architecture, gpu = sizes.architecture, cluster_gpu(cluster)
    active = active_parameter_count(architecture)
    width = DTYPE_BYTES[fit.dtype]
    weight_bytes = sizes.whole.total * width
    long_cache = fit.sequence * fit.tp * fit.pp if context > LONG_CONTEXT_TOKENS else 0.0
    bandwidth = gpu.memory_bandwidth_gb_per_second * GB * fit.tp
    per_token = kv_bytes_per_token(
        architecture, bytes_per_element=width, tensor_parallel_size=fit.tp
    )
    num_layers = max(sizes.layers_per_stage(fit.pp))
    return ServingPlan(
        model=model,
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
        utilization=utilization,
        budget_gb_per_gpu=fit.budget / GB,
        weights_gb_per_gpu=fit.weights / GB,
        kv_cache_gb_per_gpu=(fit.budget - fit.weights) / GB,
        kv_bytes_per_token_per_gpu=per_token * num_layers / architecture.num_layers,
        kv_gb_per_sequence_per_gpu=fit.sequence / GB,
        max_concurrent_sequences=fit.num_sequences,
        max_concurrent_sequences_bf16_ends=fit.num_sequences_bf16_ends,
        decode_tokens_per_second_limit=bandwidth / (active * width),
        gpus_needed_rule=gpus_needed(weight_bytes, gpu.memory_gb * GB, long_cache),
        notes=tuple(_notes(sizes, cluster, fit, refused, model, context, utilization)),
    )


def distribution_shape(architecture: ArchitectureConfig, tp: int, pp: int) -> DistributionShape:
    """The name of how such a model is spread over GPUs.

    Experts beyond what TP reaches (one key-value head a rank) are spread by expert parallelism,
    with attention replicated; MLA's one latent makes that the rule.
    """
    is_moe, attention = architecture.moe is not None, architecture.attention
    if tp * pp == 1:
        return "single-GPU MoE" if is_moe else "single-GPU dense"
    if not is_moe:
        return "TP dense"
    if not isinstance(attention, GroupedQueryAttention):
        return "MLA + MoE"
    return "TP MoE" if pp == 1 else "DP attention + EP MoE"


def _notes(
    sizes: ModelSizes,
    cluster: ClusterConfig,
    fit: _Fit,
    refused: list[_Fit],
    model: str,
    context: int,
    utilization: float,
) -> Iterator[str]:
    architecture, gpu = sizes.architecture, cluster_gpu(cluster)
    yield from _walls(fit, refused, utilization, gpu.memory_gb)
    if fit.dtype == "fp8":
        yield (
            f"fp8 weights and cache: {fit.num_sequences} sequences with every parameter at one "
            f"byte; {fit.num_sequences_bf16_ends} when embedding and head stay in bf16."
        )
    if context > architecture.max_position_embeddings:
        yield (
            f"{context:,} tokens are beyond the {architecture.max_position_embeddings:,} positions "
            f"that {model} was made for."
        )
    if any(layer.window is not None and layer.window < context for layer in architecture.layers):
        yield "Layers with a window keep only that many tokens of a sequence."
    if not isinstance(architecture.attention, GroupedQueryAttention) and fit.tp > 1:
        yield (
            "MLA's latent is one key-value head: each tensor-parallel rank keeps a copy. "
            "Data-parallel attention saves that memory."
        )
    replicas = cluster.num_gpus // (fit.tp * fit.pp)
    if replicas > 1:
        size = fit.tp * fit.pp
        gpus = "1 GPU" if size == 1 else f"{size} GPUs"
        yield f"{replicas} replicas of {gpus} each; sequences are counted for one."
    left = cluster.num_gpus - replicas * fit.tp * fit.pp
    if left:
        yield f"{left} of {cluster.num_gpus} GPUs stay unused."


def _walls(fit: _Fit, refused: list[_Fit], utilization: float, memory_gb: float) -> Iterator[str]:
    """What did not fit before: the widest split of each format that was tried."""
    widest = {(way.dtype, way.pp): way for way in refused}
    for (dtype, pp), way in widest.items():
        if (dtype, pp) == (fit.dtype, fit.pp):
            continue
        stages = f", {pp} stages" if pp > 1 else ""
        yield (
            f"{dtype} is a wall: {way.weights / GB:.1f} GB of weights a GPU at TP {way.tp}{stages} "
            f"and {way.sequence / GB:.1f} GB for one sequence, {way.budget / GB:.1f} GB may be "
            f"filled ({utilization:.0%} of {memory_gb:g} GB)."
        )


def _nothing_fits(
    sizes: ModelSizes,
    cluster: ClusterConfig,
    refused: list[_Fit],
    model: str,
    context: int,
    tensor_parallel_size: int | None,
    utilization: float,
) -> str:
    gpu = cluster_gpu(cluster)
    best = min(refused, key=lambda fit: fit.weights + fit.sequence)
    head = (
        f"{model} does not fit {cluster.nodes} x {cluster.gpus_per_node} {gpu.name}: at best "
        f"{best.weights / GB:.1f} GB of {best.dtype} weights (TP {best.tp}, PP {best.pp}) and "
        f"{best.sequence / GB:.2f} GB for one sequence of {context:,} tokens a GPU, "
        f"{best.budget / GB:.1f} GB may be filled ({utilization:.0%} of {gpu.memory_gb:g} GB).\n"
    )
    least = sizes.whole.total * DTYPE_BYTES[best.dtype] / (utilization * gpu.memory_gb * GB)
    for larger in growing_clusters(cluster, least):
        degrees = legal_serving_degrees(sizes.architecture, larger)
        if tensor_parallel_size is not None:
            degrees = tuple(d for d in degrees if d == tensor_parallel_size)
        ways = _ways(sizes, larger, degrees, context, utilization)
        if any(fit.is_enough for fit in ways):
            return head + f"Smallest cluster that would do: {cluster_flags(larger)}."
    return head + f"No cluster of {gpu.name} was found that would do; a shorter --context may."
