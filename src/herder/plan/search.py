"""Chooses a layout: the simplest that fits, the fastest by simulation, or the one that was given.

Owns the choice and the record of what was refused; what a layout costs is priced by memory and
step_time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, LayoutConfig
from herder.errors import PlanError
from herder.plan.candidates import (
    Fit,
    Request,
    all_layouts,
    fits,
    layouts_by_simplicity,
    least_memory,
    make_layout,
)
from herder.plan.layout import (
    MAX_DATA_PARALLEL_RANKS,
    Layout,
    growing_clusters,
    legal_expert_degrees,
    tensor_degree_problem,
    tensor_degrees_told,
)
from herder.plan.memory import STATE_BYTES
from herder.plan.stages import ModelSizes
from herder.plan.step_time import simulate_step
from herder.units import GB


class Rejected(Record):
    """A layout that was looked at and refused, and why."""

    layout: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what was refused on the way."""

    fit: Fit
    rejected: tuple[Rejected, ...]


def choose_simplest(sizes: ModelSizes, cluster: ClusterConfig, request: Request) -> Choice | None:
    """The first layout in order of simplicity that satisfies memory and the cap."""
    rejected: list[Rejected] = []
    for layout in layouts_by_simplicity(sizes, cluster, request.train.sequence_length):
        fit = next(fits(sizes, layout, cluster, request), None)
        reason = _refusal(sizes, layout, cluster, request, fit)
        if fit is not None and reason is None:
            return Choice(fit, tuple(rejected))
        rejected.append(Rejected(layout=layout.told(), reason=reason or "no micro-batch divides"))
    return None


def nearest_refusals(sizes: ModelSizes, cluster: ClusterConfig, request: Request) -> list[Rejected]:
    """The layouts that the order of simplicity refuses, those that need least memory first."""
    found: list[tuple[float, Rejected]] = []
    for layout in layouts_by_simplicity(sizes, cluster, request.train.sequence_length):
        fit = next(fits(sizes, layout, cluster, request), None)
        reason = _refusal(sizes, layout, cluster, request, fit)
        least = least_memory(sizes, layout, cluster, request)
        if reason is not None:
            needed = least.total if least is not None else inf
            found.append((needed, Rejected(layout=layout.told(), reason=reason)))
    return [rejected for _, rejected in sorted(found, key=lambda entry: entry[0])]


def _refusal(
    sizes: ModelSizes,
    layout: Layout,
    cluster: ClusterConfig,
    request: Request,
    fit: Fit | None,
) -> str | None:
    """Why this layout will not do; None when it will."""
    if fit is None:
        least = least_memory(sizes, layout, cluster, request)
        if least is None:
            return "the tokens of a micro-batch are no multiple of TP and twice CP"
        return f"needs {least.total:,.1f} GB a device, {least.budget:,.1f} GB may be filled"
    if layout.num_shards > MAX_DATA_PARALLEL_RANKS:
        return (
            f"fits memory ({fit.memory.total:,.1f} GB), but communicates over "
            f"{layout.num_shards:,} data-parallel ranks; the cap is {MAX_DATA_PARALLEL_RANKS}"
        )
    return None


def choose_fastest(sizes: ModelSizes, cluster: ClusterConfig, request: Request) -> Choice | None:
    """The layout, micro-batch and recompute with most simulated tokens a second.

    A layout that needs a larger global batch than was asked for is taken only if none keeps to it.
    """
    asked = request.train.global_batch_tokens
    ranked: list[tuple[bool, float, Fit]] = []
    for fit in _worthwhile(sizes, cluster, request):
        keeps = asked is None or fit.global_batch_tokens <= asked
        ranked.append((keeps, tokens_per_second(sizes, cluster, fit), fit))
    if not ranked:
        return None
    ranked.sort(reverse=True, key=lambda entry: entry[:2])
    _, best, chosen = ranked[0]
    others: dict[Layout, float] = {}
    for _, rate, fit in ranked:
        others.setdefault(fit.layout, rate)
    slower = [entry for entry in others.items() if entry[0] != chosen.layout][:5]
    return Choice(
        chosen,
        tuple(
            Rejected(layout=layout.told(), reason=f"simulated {1 - rate / best:.1%} slower")
            for layout, rate in slower
        ),
    )


def _worthwhile(sizes: ModelSizes, cluster: ClusterConfig, request: Request) -> Iterator[Fit]:
    """All fits but those that cannot be faster than one before.

    Recompute only costs time where a layout does without, and so does a ZeRO stage above the first
    that shards the optimizer and keeps all activations.
    """
    settled: set[Layout] = set()
    for layout in all_layouts(sizes, cluster, request.train.sequence_length):
        degrees = layout.model_copy(update={"zero_stage": 0})
        if degrees in settled:
            continue
        does_without = False
        for fit in fits(sizes, layout, cluster, request):
            if fit.workload.recompute == "full" and does_without:
                break
            does_without = does_without or fit.workload.recompute == "none"
            yield fit
        if does_without and layout.zero_stage >= 1:
            settled.add(degrees)


def tokens_per_second(sizes: ModelSizes, cluster: ClusterConfig, fit: Fit) -> float:
    """Simulated training throughput of the whole cluster."""
    step = simulate_step(sizes, fit.layout, fit.workload, cluster)
    return fit.global_batch_tokens / step.total


def choose_given(
    sizes: ModelSizes, cluster: ClusterConfig, request: Request, given: LayoutConfig, model: str
) -> Choice:
    """The layout given by hand with the lowest ZeRO stage that fits, unless that is given too."""
    layouts = list(_given_layouts(sizes, cluster, given, model))
    rejected: list[Rejected] = []
    for layout in layouts:
        fit = next(fits(sizes, layout, cluster, request), None)
        if fit is not None:
            return Choice(fit, tuple(rejected))
        reason = _refusal(sizes, layout, cluster, request, fit)
        rejected.append(Rejected(layout=layout.told(), reason=reason or ""))
    told = "\n".join(f"  {entry.layout}: {entry.reason}" for entry in rejected)
    raise PlanError(
        f"layout: {model} does not fit with the degrees given:\n{told}\n"
        "Give more degrees, set train.recompute: full or a smaller train.micro_batch_size, or "
        "leave layout: auto."
    )


def _given_layouts(
    sizes: ModelSizes, cluster: ClusterConfig, given: LayoutConfig, model: str
) -> Iterator[Layout]:
    architecture, world = sizes.architecture, cluster.num_gpus
    tp, pp = given.tensor_parallel_size, given.pipeline_parallel_size
    cp, ep = given.context_parallel_size, given.expert_parallel_size
    problem = tensor_degree_problem(architecture, tp, copies_kv_heads=True)
    if problem is not None:
        legal = tensor_degrees_told(architecture, cluster)
        raise PlanError(
            f"layout: tensor_parallel_size={tp} {problem} ({model}).\n"
            f"Legal on this cluster: {legal}. Leave layout: auto to have one chosen."
        )
    if pp > architecture.num_layers:
        raise PlanError(
            f"layout: pipeline_parallel_size={pp} exceeds the {architecture.num_layers} layers of "
            f"{model}. At most one stage a layer is possible."
        )
    if world % (tp * pp * cp):
        raise PlanError(
            f"layout: tensor_parallel_size x pipeline_parallel_size x context_parallel_size = "
            f"{tp} x {pp} x {cp} = {tp * pp * cp} does not divide the cluster's {world} devices "
            f"({cluster.nodes} x {cluster.gpus_per_node})."
        )
    dp = world // (tp * pp * cp)
    legal_experts = legal_expert_degrees(architecture, dp)
    if ep not in legal_experts:
        raise PlanError(
            f"layout: expert_parallel_size={ep} must divide the experts of {model} and its {dp} "
            f"data-parallel ranks. Legal here: {', '.join(map(str, legal_experts))}."
        )
    stages = (1, 2, 3) if dp * cp > 1 else (0,)
    for stage in stages if given.zero_stage is None else (given.zero_stage,):
        yield make_layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero_stage=stage)


def smallest_cluster(
    sizes: ModelSizes, cluster: ClusterConfig, request: Request
) -> ClusterConfig | None:
    """The fewest devices of this kind on which a plan exists."""
    least = STATE_BYTES * sizes.whole.total / (cluster_gpu(cluster).memory_gb * GB)
    for larger in growing_clusters(cluster, least):
        if choose_simplest(sizes, larger, request) is not None:
            return larger
    return None
