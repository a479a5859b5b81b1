"""A plan that cannot be run is refused by name, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from herder.cli.models import resolve
from herder.config.catalog import model_config_json
from herder.config.run import ClusterConfig, LayoutConfig, RunConfig, TrainConfig
from herder.errors import PlanError
from herder.families.registry import architecture_from_hf
from herder.parallel.support import refuse_unsupported
from herder.plan.training import TrainingPlan, plan_training
from herder.train.prepare import plan_run
from herder.train.source import find_model


def planned(model: str, layout: LayoutConfig) -> TrainingPlan:
    architecture = architecture_from_hf(model_config_json(model), name=model)
    cluster = ClusterConfig(nodes=4, gpus_per_node=8, gpu="h100-80gb")
    train = TrainConfig(sequence_length=2048, recompute="full")
    return plan_training(architecture, cluster, train, layout, model=model)


def test_expert_and_context_parallelism_are_planned_and_refused_with_what_would_do() -> None:
    plan = planned("mixtral-8x7b-v0.1", LayoutConfig(expert_parallel_size=8))
    with pytest.raises(PlanError, match=r"expert_parallel_size=8 .*mixtral.*zero_stage: 3"):
        refuse_unsupported(plan)
    plan = planned("llama-3-8b", LayoutConfig(context_parallel_size=2))
    with pytest.raises(PlanError, match=r"context_parallel_size=2 .*context_parallel_size: 1"):
        refuse_unsupported(plan)


def test_other_layouts_are_let_through() -> None:
    refuse_unsupported(planned("llama-3-8b", LayoutConfig(tensor_parallel_size=4, zero_stage=2)))


def test_training_refuses_it_when_the_run_is_planned() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"source": "moe-debug", "initialize": "random"},
            "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
            "layout": {"expert_parallel_size": 2},
        }
    )
    source = find_model(config.model, partial(resolve, needs_weights=False), needs_weights=False)
    with pytest.raises(PlanError, match="expert_parallel_size=2 can be planned, not run yet"):
        plan_run(config, source)


def test_refusing_needs_no_torch() -> None:
    told = "import sys, herder.parallel.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0
