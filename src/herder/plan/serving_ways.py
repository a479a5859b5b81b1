"""How a model could be served, way by way: what its weights and one sequence take of a GPU.

Owns the order in which ways are tried: bf16 by TP, fp8 by TP, as published by TP; in the last of
these formats experts spread over GPUs that each have attention whole; then pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from herder.config.catalog import cluster_gpu
from herder.config.run import ClusterConfig, GpuConfig
from herder.plan.flops import kv_bytes_per_sequence
from herder.plan.layout import divisors, legal_tensor_degrees
from herder.plan.stages import ModelSizes
from herder.plan.weight_format import BF16, CACHE_BYTES, FP8, CacheDtype, WeightFormat
from herder.units import GB


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """What a serving plan is asked for."""

    sizes: ModelSizes
    cluster: ClusterConfig
    model: str
    context_tokens: int
    tensor_parallel_size: int | None
    utilization: float
    published: WeightFormat | None = None
    """How the model's own files store its weights, where they are quantized."""
    given: WeightFormat | None = None
    """The one format of weights to plan with."""

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

    @property
    def formats(self) -> list[tuple[WeightFormat, CacheDtype]]:
        """Of weights and cache, in the order of preference. Not every GPU has fp8 units."""
        if self.given is not None:
            return [(self.given, "bf16")]
        formats: list[tuple[WeightFormat, CacheDtype]] = [(BF16, "bf16")]
        if self.gpu.fp8_tflops:
            formats.append((FP8, "fp8"))
        if self.published is not None and self.published.name not in ("bf16", formats[-1][0].name):
            formats.append((self.published, formats[-1][1]))
        return formats


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes on the fullest GPU of one way to split the model."""

    tp: int
    pp: int
    ep: int
    """GPUs that experts are spread over; 1: they are split by TP as all else."""
    weight_format: WeightFormat
    cache: CacheDtype
    weights: float
    ends: float
    """Parameters of the embedding or head on that GPU."""
    sequence: float
    budget: float

    @property
    def taken(self) -> float:
        """By the weights and one sequence."""
        return self.weights + self.sequence

    @property
    def is_enough(self) -> bool:
        """Whether weights and one sequence are within the budget."""
        return self.taken <= self.budget

    def num_sequences(self, *, extra_bytes: float = 0.0) -> int:
        """How many the budget holds beside one copy of the weights."""
        each = int((self.budget - self.weights - extra_bytes) // self.sequence)
        return max(0, each) * max(1, self.ep // self.tp)

    @property
    def num_sequences_bf16_ends(self) -> int:
        """The same with embedding and head in bf16."""
        missing = max(0.0, 2 - self.weight_format.other_bytes)
        return self.num_sequences(extra_bytes=self.ends * missing)


def ways(request: ServingRequest) -> Iterator[Fit]:
    """All ways, the preferred ones first."""
    architecture, num_gpus = request.sizes.architecture, request.cluster.num_gpus
    degrees = [
        degree
        for degree in legal_tensor_degrees(architecture, request.cluster, copies_kv_heads=False)
        if request.tensor_parallel_size in (None, degree)
    ]
    formats = request.formats
    for weights, cache in formats:
        for tp in degrees:
            yield fit(request, weights, cache, tp=tp)
    weights, cache = formats[-1]
    for ep in divisors(architecture.moe.num_experts if architecture.moe else 1):
        # The attention that holds most: whole for a latent, which TP only copies; else split.
        spread = [
            fit(request, weights, cache, tp=tp, ep=ep)
            for tp in degrees
            if tp < ep <= num_gpus and ep % tp == 0
        ]
        yield from sorted(spread, key=lambda each: -each.num_sequences())
    for pp in divisors(num_gpus)[1:]:
        for tp in degrees:
            if tp * pp <= num_gpus and pp <= architecture.num_layers:
                yield fit(request, weights, cache, tp=tp, pp=pp)


def fit(
    request: ServingRequest,
    weights: WeightFormat,
    cache: CacheDtype,
    *,
    tp: int,
    pp: int = 1,
    ep: int = 1,
) -> Fit:
    """The stage whose weights and one sequence take most."""
    sizes = request.sizes
    stages = (
        Fit(
            tp=tp,
            pp=pp,
            ep=ep,
            weight_format=weights,
            cache=cache,
            weights=sizes.bytes_on_rank(pp, stage, tp=tp, ep=max(1, ep // tp), of=weights.bytes_of),
            ends=sizes.ends_of_stage(pp, stage, tp=tp),
            sequence=kv_bytes_per_sequence(
                sizes.architecture,
                layers=sizes.stage_layers(pp)[stage],
                num_tokens=request.context_tokens,
                bytes_per_element=CACHE_BYTES[cache],
                tensor_parallel_size=tp,
            ),
            budget=request.budget_bytes,
        )
        for stage in sizes.distinct_stages(pp)
    )
    return max(stages, key=lambda each: each.taken)


def decode_seconds(request: ServingRequest, chosen: Fit) -> float:
    """To read the weights that one token meets, at full memory bandwidth.

    Of an untied embedding that is one row. Its k experts may lie on as many GPUs.
    """
    sizes = request.sizes
    architecture = sizes.architecture
    moe, num_bytes = architecture.moe, sizes.bytes_by_module(chosen.weight_format.bytes_of)
    if not architecture.tie_embeddings:
        del num_bytes["embedding"]
    experts = num_bytes.pop("experts", 0.0)
    seconds = sum(num_bytes.values()) / chosen.tp
    if moe is not None:
        k = moe.num_experts_per_token
        seconds += experts * k / moe.num_experts / max(chosen.tp, min(chosen.ep, k))
    return seconds / (request.gpu.memory_bandwidth_gb_per_second * GB)
