from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.run import (
    CheckpointConfig,
    ClusterConfig,
    EvaluateConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from herder.errors import ResourceError
from herder.plan.design import design_markdown, risks, run_cost, write_design
from herder.plan.training import TrainingPlan, plan_training

Published = Callable[[str], ArchitectureConfig]

CONFIG = RunConfig(
    model=ModelConfig(source="llama-3-8b", initialize="random"),
    train=TrainConfig(
        steps=2000, sequence_length=8192, global_batch_tokens=2**22, recompute="full"
    ),
    checkpoint=CheckpointConfig(every_steps=500, keep_last=3),
)


@pytest.fixture
def plan(published: Published) -> TrainingPlan:
    on = ClusterConfig(nodes=4, gpus_per_node=8, gpu="h100-80gb")
    return plan_training(published("llama-3-8b"), on, CONFIG.train, model="llama-3-8b")


def test_cost_is_steps_over_goodput_times_devices(plan: TrainingPlan) -> None:
    cost = run_cost(CONFIG, plan, 2.5)
    assert cost.num_tokens == 2000 * 2**22
    seconds = 2000 * plan.step_time_seconds.total / plan.reliability.goodput
    assert cost.wall_seconds == pytest.approx(seconds)
    assert cost.device_hours == pytest.approx(seconds / 3600 * 32)
    assert cost.price == pytest.approx(cost.device_hours * 2.5)


def test_the_page_holds_what_a_team_reviews(plan: TrainingPlan) -> None:
    page = design_markdown(CONFIG, plan, recipe="recipes/mine.yaml", gpu_hour_price=2.5)
    cost = run_cost(CONFIG, plan, 2.5)
    for fact in (
        "# Experiment design: llama-3-8b",
        "8,030,261,248 parameters",
        "random weights",
        "`wikipedia-leads`",
        "2,000 of 4,194,304 tokens = 8.39B tokens",
        "4 x 8 h100-80gb",
        plan.layout.told(),
        f"{cost.device_hours:,.2f} GPU-hours; {cost.price:,.2f} at the price given",
        "every 500 steps, the last 3 kept",
        "herder train recipes/mine.yaml",
    ):
        assert fact in page
    assert len(page.splitlines()) <= 60, "it is one page"


def test_without_a_price_there_is_no_sum(plan: TrainingPlan) -> None:
    assert "no price given" in design_markdown(CONFIG, plan, recipe="r.yaml")


def test_risks_follow_from_the_figures(plan: TrainingPlan) -> None:
    found = "\n".join(risks(CONFIG, plan, run_cost(CONFIG, plan, None)))
    assert "1 tokens a parameter: compute-optimal training from scratch takes about 20" in found
    assert "No warm-up" in found
    assert "Nothing is evaluated during training" in found
    assert "A failure loses up to" in found


def test_an_evaluation_that_never_comes_is_a_risk(plan: TrainingPlan) -> None:
    late = CONFIG.model_copy(update={"evaluate": EvaluateConfig(every_steps=5000)})
    found = "\n".join(risks(late, plan, run_cost(late, plan, None)))
    assert "evaluate.every_steps exceeds the 2,000 steps" in found


def test_a_page_that_cannot_be_written_is_refused(plan: TrainingPlan, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be written"):
        write_design(tmp_path / "absent" / "design.md", CONFIG, plan, recipe="r.yaml")
    write_design(tmp_path / "design.md", CONFIG, plan, recipe="r.yaml")
    assert (tmp_path / "design.md").read_text().startswith("# Experiment design")
