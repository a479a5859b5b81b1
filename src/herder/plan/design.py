"""The one-page experiment design that a team reviews before a run.

Owns the page: sizes, data, layout, steps, time, cost, checkpoints and the risks that follow from
the figures. Everything on it comes from the recipe and its plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from herder.config.catalog import cluster_gpu
from herder.config.run import RunConfig
from herder.errors import ResourceError
from herder.plan.table import MODULE_NAMES
from herder.plan.training import TrainingPlan
from herder.units import GB, format_count, format_flops, format_gb, format_seconds

CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""Compute-optimal training from scratch. Source: arXiv:2203.15556, section 3.4 and table 3."""
TIGHT_MEMORY_SHARE = 0.95
"""Of the budget: above this a longer document or another library version may not fit."""
STEP_TIME_ERROR = "-14 % to +6 %"
"""How far the same plan moved when its owners measured it twice: NVIDIA's Megatron Bridge summaries
of the same models in different containers."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the whole run takes."""

    num_tokens: int
    wall_seconds: float
    """Steps over goodput: with the time that failures and saves are expected to take."""
    device_hours: float
    price: float | None


def run_cost(config: RunConfig, plan: TrainingPlan, gpu_hour_price: float | None) -> Cost:
    """Tokens, wall time, device-hours and money of a recipe's steps."""
    steps = config.train.steps
    wall = steps * plan.step_time_seconds.total / max(plan.reliability.goodput, 0.01)
    hours = wall / 3600 * plan.cluster.num_gpus
    price = None if gpu_hour_price is None else hours * gpu_hour_price
    return Cost(steps * plan.global_batch_tokens, wall, hours, price)


def design_markdown(
    config: RunConfig, plan: TrainingPlan, *, recipe: str, gpu_hour_price: float | None = None
) -> str:
    """The page as markdown."""
    cost = run_cost(config, plan, gpu_hour_price)
    start = "its published weights" if _continues(config) else "random weights"
    lines = [
        f"# Experiment design: {plan.model}",
        "",
        f"Recipe `{recipe}`, run directory `{config.run_directory}`. Figures are planned, not "
        f"measured; owners saw the same plan move by {STEP_TIME_ERROR} between two measurements.",
        "",
        f"**What.** Train {plan.model} ({plan.parameters:,} parameters, "
        f"{plan.active_parameters:,} active) from {start} to predict the next token of "
        f"`{config.data.source}`.",
        "",
        *_table(("", ""), _sizes(config, plan, cost)),
        "",
        "## Where it goes",
        "",
        *_table(
            ("module", "parameters", "training FLOPs a token", "state a device"),
            (
                (
                    MODULE_NAMES.get(share.module, share.module),
                    f"{share.parameters:,} ({share.parameters / plan.parameters:.1%})",
                    f"{format_flops(share.training_flops_per_token)} "
                    f"({share.training_flops_per_token / plan.flops_per_token:.1%})",
                    format_gb(share.state_gb * GB),
                )
                for share in plan.modules
            ),
        ),
        "",
        "## Risks",
        "",
        *(f"- {risk}" for risk in risks(config, plan, cost)),
        "",
        "## Layouts that were rejected",
        "",
        *(_rejected(plan) or ["None: the first one that was looked at fits."]),
        "",
        "## Run",
        "",
        f"    herder train {recipe}",
        f"    herder evaluate {config.run_directory}",
        "",
    ]
    return "\n".join(lines)


def write_design(
    path: Path,
    config: RunConfig,
    plan: TrainingPlan,
    *,
    recipe: str,
    gpu_hour_price: float | None = None,
) -> None:
    """Writes the page. Raises ResourceError when the file cannot be written."""
    page = design_markdown(config, plan, recipe=recipe, gpu_hour_price=gpu_hour_price)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{path}: the design cannot be written: {error}.") from None


def _continues(config: RunConfig) -> bool:
    return config.model.initialize == "pretrained"


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _sizes(config: RunConfig, plan: TrainingPlan, cost: Cost) -> Iterator[tuple[str, str]]:
    train, memory, gpu = config.train, plan.memory_gb, cluster_gpu(plan.cluster)
    limit = config.data.max_documents
    yield (
        "data",
        f"`{config.data.source}`{f', {limit:,} documents' if limit else ''}; "
        f"{config.data.validation_fraction:.1%} of documents held out by a hash of their text",
    )
    yield (
        "steps",
        f"{train.steps:,} of {plan.global_batch_tokens:,} tokens = "
        f"{format_count(cost.num_tokens)} tokens, sequences of {plan.sequence_length:,}",
    )
    yield (
        "optimizer",
        f"{train.optimizer.kind}, learning rate {train.optimizer.learning_rate:g}, "
        f"{train.schedule.kind} after {train.schedule.warmup_steps:,} steps of warm-up, weight "
        f"decay {train.optimizer.weight_decay:g}, gradients clipped at {train.clip_norm:g}, "
        f"seed {train.seed}",
    )
    yield "hardware", f"{plan.cluster.nodes:,} x {plan.cluster.gpus_per_node} {gpu.name}"
    yield (
        "layout",
        f"{plan.layout.told()}; micro-batch {plan.micro_batch_size}, "
        f"{plan.num_micro_batches} a step; {plan.precision.compute}, recompute {plan.recompute}",
    )
    yield (
        "memory a device",
        f"{format_gb(memory.total * GB)} of {format_gb(memory.budget * GB)} that may be filled: "
        f"state {format_gb(memory.largest_rank_state * GB)}, activations "
        f"{format_gb(memory.activations * GB)}, logits {format_gb(memory.logits * GB)}, buffers "
        f"{format_gb(memory.buffers * GB)}, overhead {format_gb(memory.overhead * GB)}",
    )
    yield (
        "speed",
        f"{format_seconds(plan.step_time_seconds.total)} a step, "
        f"{plan.tokens_per_second:,.0f} tokens/s, MFU {plan.model_flops_utilization:.1%}",
    )
    yield "time", f"{format_seconds(cost.wall_seconds)}, goodput {plan.reliability.goodput:.1%}"
    unit = "machine-hours" if gpu.kind == "cpu" else "GPU-hours"
    money = "no price given" if cost.price is None else f"{cost.price:,.2f} at the price given"
    yield "cost", f"{cost.device_hours:,.2f} {unit}; {money}"
    yield (
        "checkpoints",
        f"every {config.checkpoint.every_steps:,} steps, the last {config.checkpoint.keep_last} "
        f"kept: {format_gb(_disk_bytes(config, plan))} of disk while one is written",
    )


def _disk_bytes(config: RunConfig, plan: TrainingPlan) -> float:
    return plan.reliability.checkpoint_gb * GB * (config.checkpoint.keep_last + 1)


def risks(config: RunConfig, plan: TrainingPlan, cost: Cost) -> Iterator[str]:
    """What the figures themselves warn of."""
    memory, steps = plan.memory_gb, config.train.steps
    yield from plan.adjustments
    if memory.total > TIGHT_MEMORY_SHARE * memory.budget:
        yield (
            f"Memory is tight: {format_gb(memory.total * GB)} of {format_gb(memory.budget * GB)}."
        )
    lost = min(config.checkpoint.every_steps, steps) * plan.step_time_seconds.total
    advised = plan.reliability.checkpoint_interval_steps
    yield (
        f"A failure loses up to {format_seconds(lost)} of work. Least is lost in all when saving "
        f"every {advised:,} steps (Young and Daly, one failure in "
        f"{format_seconds(plan.reliability.mean_time_between_failures_hours * 3600)})."
    )
    per_parameter = cost.num_tokens / plan.active_parameters
    if not _continues(config) and per_parameter < CHINCHILLA_TOKENS_PER_PARAMETER:
        yield (
            f"{per_parameter:.2g} tokens a parameter: compute-optimal training from scratch takes "
            f"about {CHINCHILLA_TOKENS_PER_PARAMETER}."
        )
    if config.train.schedule.warmup_steps == 0:
        yield "No warm-up: the first steps may move the weights far. See train.schedule."
    if config.evaluate.every_steps is None:
        yield "Nothing is evaluated during training: set evaluate.every_steps to see overfitting."
    elif config.evaluate.every_steps > steps:
        yield f"evaluate.every_steps exceeds the {steps:,} steps: nothing is evaluated on the way."


def _rejected(plan: TrainingPlan) -> list[str]:
    return [f"- {entry.layout}: {entry.reason}" for entry in plan.rejected[:6]]
