"""`herder plan train RECIPE`: the plan of a recipe, and the page that its team reviews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from herder.cli.models import resolve
from herder.config.architecture import ArchitectureConfig
from herder.config.load import load_run_config
from herder.config.run import ClusterConfig
from herder.plan.design import write_design
from herder.plan.training import Objective, TrainingPlan, plan_training
from herder.train.schedule import check_schedule
from herder.train.source import find_model


def plan_recipe(
    recipe: str,
    overrides: Sequence[str],
    choose_cluster: Callable[[ClusterConfig | None], ClusterConfig],
    objective: Objective,
    design: Path | None,
    gpu_hour_price: float | None,
) -> tuple[ArchitectureConfig, TrainingPlan]:
    """The model and plan of a recipe with `overrides`; its page is written where `design` says."""
    config = load_run_config(Path(recipe), overrides)
    check_schedule(config.train.schedule, steps=config.train.steps)
    source = find_model(config.model, partial(resolve, needs_weights=False), needs_weights=False)
    plan = plan_training(
        source.architecture,
        choose_cluster(config.cluster),
        config.train,
        config.layout,
        model=source.name,
        objective=objective,
    )
    if design is not None:
        write_design(design, config, plan, recipe=recipe, gpu_hour_price=gpu_hour_price)
    return source.architecture, plan
