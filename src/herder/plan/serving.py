"""Plans serving: how weights split, in which format, and how many sequences the cache holds.

Owns the ServingPlan: the first way that fits, and what is said of it. The budget is a share of each
GPU's memory; what it leaves is the engine's own (activations, graphs, communicators).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from herder.config.architecture import ArchitectureConfig, LatentAttention
from herder.config.record import Record
from herder.config.run import ClusterConfig
from herder.errors import PlanError
from herder.plan.flops import key_value_elements
from herder.plan.layout import (
    DistributionShape,
    distribution_shape,
    legal_tensor_degrees,
    smallest_cluster,
    tensor_degree_problem,
)
from herder.plan.parameters import active_parameter_count, parameter_count
from herder.plan.serving_ways import Fit, ServingRequest, decode_seconds, fit, ways
from herder.plan.stages import ModelSizes
from herder.plan.weight_format import CACHE_BYTES, FP8, CacheDtype, WeightFormat
from herder.units import GB

DEFAULT_UTILIZATION = 0.85
"""Share of a GPU's memory for weights and cache."""
DEFAULT_CONTEXT_TOKENS = 8_192
"""Or the model's window if that is shorter."""
RULE_MEMORY_SHARE = 0.6
"""Of the quick rule: weights fill three fifths of the GPUs, cache and activations the rest."""
LONG_CONTEXT_TOKENS = 32_768
"""From here on the quick rule counts one sequence's cache too."""


class ServingLayout(Record):
    """How one copy of the model is split, and how many copies the cluster holds."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    """Copies of attention, each with sequences of its own."""
    expert_parallel_size: int
    """GPUs that experts are spread over, each whole on one of them, shared by several copies of
    attention; 1: experts are split as all else is."""

    @property
    def gpus_per_replica(self) -> int:
        """GPUs with one copy of the weights."""
        split = self.tensor_parallel_size * self.pipeline_parallel_size
        return max(split, self.expert_parallel_size)

    @property
    def num_replicas(self) -> int:
        """How many copies of all weights there are."""
        split = self.tensor_parallel_size * self.pipeline_parallel_size
        return self.data_parallel_size * split // self.gpus_per_replica


class ServingPlan(Record):
    """How a model is served on a cluster."""

    model: str
    parameters: int
    active_parameters: int
    cluster: ClusterConfig
    layout: ServingLayout
    distribution_shape: DistributionShape
    weight_dtype: str
    """bf16, fp8, or as the model's own files store them: mxfp4, for example."""
    kv_cache_dtype: CacheDtype
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
    """Of context_tokens each, on one copy of the weights."""
    max_concurrent_sequences_bf16_ends: int
    """The same when fp8 weights keep embedding and head in bf16, as most checkpoints do."""
    decode_tokens_per_second_limit: float
    """For one sequence: the weights it meets, read once a token at the full memory bandwidth of the
    GPUs that hold them."""
    gpus_needed_rule: int
    """ceil(weight bytes / (0.6 x memory)), with one sequence's cache where the context is long."""
    notes: tuple[str, ...]


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
    published: WeightFormat | None = None,
    given: WeightFormat | None = None,
) -> ServingPlan:
    """The plan of serving one model.

    Without `tensor_parallel_size` the smallest legal degree at which weights and one sequence of
    `context_tokens` fit. published: how the model's files store its weights, where quantized.
    given: the one format to plan with, in place of bf16, fp8 and the published one.
    Raises PlanError when the degree given is illegal, or when nothing fits, then with the smallest
    cluster that would do.
    """
    context = context_tokens or min(DEFAULT_CONTEXT_TOKENS, architecture.max_position_embeddings)
    sizes = ModelSizes(architecture)
    request = ServingRequest(
        sizes, cluster, model, context, tensor_parallel_size, utilization, published, given
    )
    _check_degree(request)
    refused: list[Fit] = []
    for way in ways(request):
        if way.is_enough:
            return _assembled(request, way, refused)
        refused.append(way)
    raise PlanError(_nothing_fits(request, refused))


def _check_degree(request: ServingRequest) -> None:
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


def _assembled(request: ServingRequest, chosen: Fit, refused: list[Fit]) -> ServingPlan:
    sizes, cluster, gpu = request.sizes, request.cluster, request.gpu
    architecture, context = sizes.architecture, request.context_tokens
    tp, pp, layout = chosen.tp, chosen.pp, _layout(cluster.num_gpus, chosen)
    long_cache = chosen.sequence * tp * pp if context > LONG_CONTEXT_TOKENS else 0.0
    elements = key_value_elements(architecture, tensor_parallel_size=tp)
    all_weights = sum(sizes.bytes_by_module(chosen.weight_format.bytes_of).values())
    return ServingPlan(
        model=request.model,
        parameters=parameter_count(architecture),
        active_parameters=active_parameter_count(architecture),
        cluster=cluster.model_copy(update={"gpu": gpu}),
        layout=layout,
        distribution_shape=distribution_shape(architecture, tp=tp, pp=pp, ep=chosen.ep),
        weight_dtype=chosen.weight_format.name,
        kv_cache_dtype=chosen.cache,
        context_tokens=context,
        utilization=request.utilization,
        budget_gb_per_gpu=chosen.budget / GB,
        weights_gb_per_gpu=chosen.weights / GB,
        kv_cache_gb_per_gpu=(chosen.budget - chosen.weights) / GB,
        kv_bytes_per_token_per_gpu=max(sizes.layers_per_stage(pp))
        * elements
        * CACHE_BYTES[chosen.cache],
        kv_gb_per_sequence_per_gpu=chosen.sequence / GB,
        max_concurrent_sequences=chosen.num_sequences(),
        max_concurrent_sequences_bf16_ends=chosen.num_sequences_bf16_ends,
        decode_tokens_per_second_limit=1 / decode_seconds(request, chosen),
        gpus_needed_rule=gpus_needed(all_weights, gpu.memory_gb * GB, long_cache),
        notes=tuple(_notes(request, chosen, layout, refused)),
    )


def _layout(num_gpus: int, chosen: Fit) -> ServingLayout:
    """As many copies as the cluster holds."""
    split = chosen.tp * chosen.pp
    replica = max(split, chosen.ep)
    return ServingLayout(
        tensor_parallel_size=chosen.tp,
        pipeline_parallel_size=chosen.pp,
        data_parallel_size=num_gpus // replica * (replica // split),
        expert_parallel_size=chosen.ep,
    )


def _notes(
    request: ServingRequest, chosen: Fit, layout: ServingLayout, refused: list[Fit]
) -> Iterator[str]:
    architecture, context = request.sizes.architecture, request.context_tokens
    yield from _walls(request, chosen, refused)
    if chosen.weight_format == FP8:
        yield (
            f"fp8 weights and cache: {chosen.num_sequences()} sequences with every parameter at "
            f"one byte; {chosen.num_sequences_bf16_ends} when embedding and head stay in bf16."
        )
    yield from _told_of_published(request, chosen)
    if context > architecture.max_position_embeddings:
        yield (
            f"{context:,} tokens are beyond the {architecture.max_position_embeddings:,} positions "
            f"that {request.model} was made for."
        )
    if any(layer.window is not None and layer.window < context for layer in architecture.layers):
        yield "Layers with a window keep only that many tokens of a sequence."
    if isinstance(architecture.attention, LatentAttention) and chosen.tp > 1 and chosen.ep == 1:
        yield _told_of_copies(request, chosen)
    size, replicas = layout.gpus_per_replica, layout.num_replicas
    if chosen.ep > 1:
        copies = size // chosen.tp
        yield (
            f"Experts are spread over {size} GPUs; the {copies} copies of attention, TP "
            f"{chosen.tp} each, have {chosen.num_sequences() // copies:,} sequences each."
        )
    if replicas > 1:
        gpus = "1 GPU" if size == 1 else f"{size} GPUs"
        yield f"{replicas} replicas of {gpus} each; sequences are counted for one."
    if left := request.cluster.num_gpus - replicas * size:
        yield f"{left} of {request.cluster.num_gpus} GPUs stay unused."


def _walls(request: ServingRequest, chosen: Fit, refused: list[Fit]) -> Iterator[str]:
    """Of each format and kind of split that does not fit, the widest."""

    def kind(way: Fit) -> tuple[str, bool, bool]:
        return way.weight_format.name, way.pp > 1, way.ep > 1

    widest = {kind(way): way for way in refused}
    widest.pop(kind(chosen), None)
    for (name, is_staged, is_spread), way in widest.items():
        split = f", {way.pp} stages" if is_staged else f", EP {way.ep}" if is_spread else ""
        yield (
            f"{name} is a wall: {way.weights / GB:.1f} GB of weights a GPU at TP {way.tp}{split} "
            f"and {way.sequence / GB:.1f} GB for one sequence, {request.budget_told}."
        )


def _told_of_published(request: ServingRequest, chosen: Fit) -> Iterator[str]:
    """What the files' own format would take, where it is another."""
    published = request.published
    if published is None or published.name == chosen.weight_format.name:
        return
    own = fit(request, published, chosen.cache, tp=chosen.tp, pp=chosen.pp, ep=chosen.ep)
    yield (
        f"The files hold {published.name}: served as it is, weights take {own.weights / GB:.1f} GB "
        f"a GPU in place of {chosen.weights / GB:.1f} GB."
    )


def _told_of_copies(request: ServingRequest, chosen: Fit) -> str:
    """What tensor parallelism costs latent attention, and what would not."""
    told = "MLA's latent is one key-value head: each tensor-parallel rank keeps a copy. "
    whole = fit(request, chosen.weight_format, chosen.cache, tp=1, ep=chosen.tp)
    if request.sizes.architecture.moe is None or chosen.pp > 1 or not whole.is_enough:
        return told + "Data-parallel attention saves that memory."
    return told + (
        f"Data-parallel attention, experts over the same {chosen.tp} GPUs, would hold "
        f"{whole.num_sequences():,} sequences in place of {chosen.num_sequences():,}."
    )


def _nothing_fits(request: ServingRequest, refused: list[Fit]) -> str:
    cluster, gpu, sizes = request.cluster, request.gpu, request.sizes
    best = min(refused, key=lambda way: way.taken)
    larger = smallest_cluster(
        cluster,
        sum(sizes.bytes_by_module(best.weight_format.bytes_of).values()) / request.budget_bytes,
        lambda tried: any(way.is_enough for way in ways(replace(request, cluster=tried))),
    )
    return (
        f"{request.model} does not fit {cluster.nodes} x {cluster.gpus_per_node} {gpu.name}: at "
        f"best {best.weights / GB:.1f} GB of {best.weight_format.name} weights (TP {best.tp}, EP "
        f"{best.ep}, PP {best.pp}) and {best.sequence / GB:.2f} GB for one sequence of "
        f"{request.context_tokens:,} tokens a GPU, {request.budget_told}.\n"
    ) + (larger or f"No cluster of {gpu.name} was found that would do; a shorter --context may.")
