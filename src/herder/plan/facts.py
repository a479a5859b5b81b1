"""A training plan in words: the rows that its table and its design page both show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from herder.config.catalog import cluster_gpu
from herder.config.run import ClusterConfig
from herder.plan.training import TrainingPlan
from herder.units import GB, TFLOP, format_flops, format_gb, format_seconds

MODULE_COLUMNS = ("module", "parameters", "training FLOPs/token", "state/device")
_NAMES = {"feed_forward": "feed-forward", "shared_expert": "shared expert"}


def training_facts(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """What was chosen and what to expect of it, each by its name."""
    layout, reliability = plan.layout, plan.reliability
    yield "cluster", told_cluster(plan.cluster)
    stages = ""
    if layout.pipeline_parallel_size > 1:
        stages = f", stages of {_runs(plan.layers_per_stage)} layers ({plan.pipeline_schedule})"
    context = f", context by {plan.context_method}" if layout.context_parallel_size > 1 else ""
    yield "layout", f"{layout.told()}{stages}{context}"
    yield "shape", plan.distribution_shape
    yield "why", plan.layout_reason
    yield (
        "precision",
        f"{plan.precision.compute} compute, {plan.precision.parameters} parameters, "
        f"{plan.precision.gradients} gradients, {plan.precision.optimizer} optimizer; recompute "
        f"{plan.recompute}",
    )
    yield (
        "global batch",
        f"{plan.global_batch_tokens:,} tokens = {plan.num_micro_batches} x {plan.micro_batch_size} "
        f"sequences of {plan.sequence_length:,} on {layout.data_parallel_size:,} data-parallel "
        f"rank{'s' if layout.data_parallel_size > 1 else ''}",
    )
    yield (
        "speed",
        f"{format_seconds(plan.step_time_seconds.total)} a step, {plan.tokens_per_second:,.0f} "
        f"tokens/s, MFU {plan.model_flops_utilization:.1%} of "
        f"{format_flops(plan.peak_tflops_per_gpu * TFLOP)}/s",
    )
    yield (
        "failures",
        f"one in {format_seconds(reliability.mean_time_between_failures_hours * 3600)}; save "
        f"{format_gb(reliability.checkpoint_gb * GB)} every "
        f"{format_seconds(reliability.checkpoint_interval_seconds)} "
        f"({reliability.checkpoint_interval_steps:,} steps): goodput {reliability.goodput:.1%}",
    )


def _runs(counts: Sequence[int]) -> str:
    """31, 32, 32, 31 as it is when short, else how many of each."""
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    return ", ".join(f"{counts.count(kind)} x {kind}" for kind in dict.fromkeys(counts))


def told_cluster(cluster: ClusterConfig) -> str:
    """Nodes, devices and their memory."""
    gpu = cluster_gpu(cluster)
    total = f" = {cluster.num_gpus:,}" if cluster.nodes > 1 else ""
    size = f"{cluster.nodes:,} x {cluster.gpus_per_node} {gpu.name}{total}"
    return f"{size}, {told_size(gpu.memory_gb)} each"


def told_size(gb: float) -> str:
    """A nominal size: 80 GB, 25.3 GB."""
    return f"{gb:,.1f}".removesuffix(".0") + " GB"


def memory_parts(plan: TrainingPlan) -> dict[str, float]:
    """GB on the fullest device by part."""
    names = ("largest_rank_state", "activations", "logits", "buffers", "overhead")
    parts = plan.memory_gb.model_dump(include=set(names))
    return {name.removeprefix("largest_rank_"): parts[name] for name in names}


def module_rows(plan: TrainingPlan) -> Iterator[tuple[str, str, str, str]]:
    """Under MODULE_COLUMNS: each kind of module with its shares, and their total."""
    is_tied = all(share.parameters == 0 for share in plan.modules if share.module == "head")
    for share in plan.modules:
        name = _NAMES.get(share.module, share.module)
        flops, state = share.training_flops_per_token, format_gb(share.state_gb * GB)
        yield (
            "head (tied)" if name == "head" and is_tied else name,
            _with_share(f"{share.parameters:,}", share.parameters / plan.parameters),
            _with_share(format_flops(flops), flops / plan.flops_per_token),
            state if share.parameters else "-",
        )
    total = format_gb(plan.memory_gb.state * GB)
    yield "total", f"{plan.parameters:,}", format_flops(plan.flops_per_token), total


def _with_share(told: str, share: float) -> str:
    return f"{told} ({share:.1%})" if share else "-"
