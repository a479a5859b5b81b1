"""The one-page experiment design that a team reviews before a run.

Owns the page: sizes, data, layout, steps, time, cost, checkpoints and the risks that follow from
the figures. Everything on it comes from the recipe and its plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from herder.config.catalog import cluster_gpu
from herder.config.run import RunConfig
from herder.errors import ResourceError
from herder.plan.facts import MODULE_COLUMNS, memory_parts, module_rows, training_facts
from herder.plan.training import TrainingPlan
from herder.units import GB, format_count, format_gb, format_seconds

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
    sizes = "\n".join(_row(row) for row in _sizes(config, plan, cost))
    modules = "\n".join(_row(row) for row in module_rows(plan))
    risk_list = "\n".join(f"- {risk}" for risk in risks(config, plan, cost))
    rejected = "\n".join(f"- {entry.layout}: {entry.reason}" for entry in plan.rejected[:6])
    return f"""# Experiment design: {plan.model}

Recipe `{recipe}`, run directory `{config.run_directory}`. Figures are planned, not measured; owners
saw the same plan move by {STEP_TIME_ERROR} between two measurements.

**What.** Train {plan.model} ({plan.parameters:,} parameters, {plan.active_parameters:,} active)
from {start} to predict the next token of `{config.data.source}`.

| | |
|---|---|
{sizes}

## Where it goes

{_row(MODULE_COLUMNS)}
{_row(("---",) * len(MODULE_COLUMNS))}
{modules}

## Risks

{risk_list}

## Layouts that were rejected

{rejected or "None: the first one that was looked at fits."}

## Run

    herder train {recipe}
    herder evaluate {config.run_directory}
"""


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


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
    yield from training_facts(plan)
    parts = ", ".join(f"{name} {format_gb(gb * GB)}" for name, gb in memory_parts(plan).items())
    total, budget = format_gb(memory.total * GB), format_gb(memory.budget * GB)
    yield "memory a device", f"{total} of {budget} that may be filled: {parts}"
    unit = "machine-hours" if gpu.kind == "cpu" else "GPU-hours"
    money = "no price given" if cost.price is None else f"{cost.price:,.2f} at the price given"
    yield "time", format_seconds(cost.wall_seconds)
    yield "cost", f"{cost.device_hours:,.2f} {unit}; {money}"
    saved, kept = plan.reliability.checkpoint_gb * GB, config.checkpoint.keep_last
    yield (
        "checkpoints",
        f"every {config.checkpoint.every_steps:,} steps, the last {kept} kept: "
        f"{format_gb(saved * (kept + 1))} of disk while one is written",
    )


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
