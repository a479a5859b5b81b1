"""A dry run reads from a rank's tensors what the planner counted without them."""

from __future__ import annotations

from typing import Any

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import debug_model_names, gpu, model_config_json
from herder.config.run import ClusterConfig, LayoutConfig, TrainConfig
from herder.families.registry import architecture_from_hf
from herder.parallel.dry_run import dry_run, heaviest_rank
from herder.plan.allocated import MASTER_BYTES
from herder.plan.parameters import parameter_count
from herder.plan.training import TrainingPlan, plan_training

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "copies": (4, {"zero_stage": 0}),
    "five shards": (5, {"zero_stage": 1}),
    "copies of shards": (6, {"zero_stage": 2, "data_parallel_replicas": 2}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "tensor and shards": (6, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "parts of sequences": (4, {"context_parallel_size": 2, "zero_stage": 3}),
    "all three": (12, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1}),
}


def model(name: str) -> ArchitectureConfig:
    return architecture_from_hf(model_config_json(name), name=name)


def plan_of(architecture: ArchitectureConfig, num_ranks: int, layout: Any) -> TrainingPlan:
    cluster = ClusterConfig(gpus_per_node=num_ranks, gpu=gpu("cpu"))
    train = TrainConfig(sequence_length=48, micro_batch_size=1)
    return plan_training(architecture, cluster, train, LayoutConfig(**layout))


SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "copies": (4, {"expert_parallel_size": 2, "zero_stage": 0}),
    "two shards": (4, {"expert_parallel_size": 2, "zero_stage": 1}),
    "no shards": (2, {"expert_parallel_size": 2, "zero_stage": 3}),
    "copies of shards": (
        8,
        {"expert_parallel_size": 2, "zero_stage": 2, "data_parallel_replicas": 2},
    ),
    "tensor": (8, {"expert_parallel_size": 2, "zero_stage": 3, "tensor_parallel_size": 2}),
    "parts of sequences": (4, {"expert_parallel_size": 4, "context_parallel_size": 2}),
}
"""Of models with experts."""


@pytest.mark.parametrize("layout", SPREAD)
def test_a_rank_holds_its_experts_as_planned(layout: str) -> None:
    architecture, (num_ranks, degrees) = model("moe-debug"), SPREAD[layout]
    plan = plan_of(architecture, num_ranks, degrees)
    found = [dry_run(architecture, plan, rank) for rank in range(num_ranks)]
    for each in found:
        assert each.unexplained_bytes == 0, each
    assert found[heaviest_rank(plan)].parameter_bytes == plan.state_bytes.parameters


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", debug_model_names())
def test_no_rank_allocates_more_than_the_heaviest_which_holds_what_was_planned(
    name: str, layout: str
) -> None:
    architecture, (num_ranks, degrees) = model(name), LAYOUTS[layout]
    plan = plan_of(architecture, num_ranks, degrees)
    found = [dry_run(architecture, plan, rank) for rank in range(num_ranks)]
    heaviest = found[heaviest_rank(plan)]
    assert heaviest.parameter_bytes == heaviest.planned_parameter_bytes
    assert heaviest.parameter_bytes == plan.state_bytes.parameters
    for each in found:
        assert each.unexplained_bytes == 0, each
        assert each.parameter_bytes + each.padding_bytes == each.planned_parameter_bytes
        assert each.parameter_bytes <= heaviest.parameter_bytes
    if layout == "five shards":
        whole = sum(each.parameter_bytes for each in found)
        assert whole == MASTER_BYTES * parameter_count(architecture)


def test_a_rank_with_less_than_its_share_says_how_much_is_padding() -> None:
    architecture = model("llama-debug")
    plan = plan_of(architecture, 5, {"zero_stage": 1})
    last = dry_run(architecture, plan, 4)
    assert last.coordinates == {"pp": 0, "dp": 0, "fsdp": 4, "cp": 0, "tp": 0}
    assert last.padding_bytes > 0


def test_a_model_that_is_not_the_plans_is_noticed() -> None:
    architecture = model("llama-debug")
    plan = plan_of(architecture, 2, {"pipeline_parallel_size": 2})
    first, *middle, last = plan.layers_per_stage
    other = plan.model_copy(update={"layers_per_stage": (first - 1, *middle, last + 1)})
    assert dry_run(architecture, other, 0).unexplained_bytes < 0
    assert dry_run(architecture, other, 1).unexplained_bytes > 0
