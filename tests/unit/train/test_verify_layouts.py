"""Short names of layouts, their plans, and a plan scaled down."""

from __future__ import annotations

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import gpu, model_config_json
from herder.config.run import ClusterConfig, LayoutConfig, TrainConfig
from herder.errors import ConfigError, PlanError
from herder.families.registry import architecture_from_hf
from herder.plan.training import plan_model_training, plan_training
from herder.train.shrink import shrunk
from herder.train.verify_layouts import (
    MAX_RANKS,
    SCHEDULES,
    every_layout,
    parse_layout,
    parse_layouts,
    plan_layout,
    scaled_down,
)


def published(name: str) -> ArchitectureConfig:
    return architecture_from_hf(model_config_json(name), name=name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tq=2", "unknown key 'tq'. Known: .*fsdp.* For example tp=2,pp=2"),
        ("fdsp=2", "Did you mean 'fsdp'"),
        ("tp", "'tp' is no key=value"),
        ("", "'' is no key=value"),
        ("tp=2,tp=4", "tp is given twice"),
        ("tp=two", "tp is a number of ranks, given 'two'"),
        ("tp=0", "tp is a number of ranks, given '0'"),
        ("fsdp=2,zero=4", "zero=4 does not exist. Known: 1, 2, 3"),
        ("pp=2,schedule=1f1c", "Did you mean '1f1b'"),
        ("zero=1", "zero is of fsdp, which is not split here. Add fsdp=2"),
        ("tp=2,schedule=gpipe", "schedule is of pp"),
        ("tp=2,context=ring", "context is of cp"),
    ],
)
def test_a_mistyped_layout_is_told_with_what_would_do(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_layout(text)


def test_names_become_degrees_of_a_plan() -> None:
    layout = parse_layout("dp=2, fsdp=2,zero=1,pp=2,schedule=gpipe,recompute=full")
    assert (layout.num_ranks, layout.num_data_ranks) == (8, 4)
    plan = plan_layout(shrunk(published("llama-debug")), layout)
    assert plan.layout.num_ranks == 8
    assert plan.mesh_axes["dp"] == plan.mesh_axes["fsdp"] == plan.mesh_axes["pp"] == 2
    assert (plan.layout.zero_stage, plan.pipeline_schedule) == (1, "gpipe")
    assert (plan.recompute, plan.precision.compute) == ("full", "fp32")
    assert plan.num_micro_batches * 4 == 8


def test_fsdp_alone_shards_everything_and_dp_alone_nothing() -> None:
    architecture = shrunk(published("llama-debug"))
    stages = [
        plan_layout(architecture, parse_layout(text)).layout.zero_stage
        for text in ("fsdp=2", "dp=2", "tp=2")
    ]
    assert stages == [3, 0, 0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dp=2,ep=2", "expert_parallel_size=2 must divide the experts"),
        ("dp=3,tp=4", "12 ranks; at most 8"),
        ("tp=3", "tensor_parallel_size=3 does not divide num_attention_heads"),
        ("pp=8", "8 stages of 4 layers|exceeds the 4 layers"),
    ],
)
def test_what_has_no_plan_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        plan_layout(shrunk(published("llama-debug")), parse_layout(text))


def test_all_holds_every_axis_schedule_stage_and_pair() -> None:
    texts = [layout.text for layout in every_layout()]
    assert len(set(texts)) == len(texts)
    assert {"dp=2", "tp=2", "tp=4", *(f"fsdp=2,zero={stage}" for stage in (1, 2, 3))} <= {*texts}
    assert all(any(f"schedule={schedule}" in text for text in texts) for schedule in SCHEDULES)
    split = {
        frozenset(name for name, degree in layout.degrees.items() if degree > 1)
        for layout in every_layout()
    }
    axes = ("dp", "fsdp", "tp", "pp", "cp")
    assert {frozenset((a, b)) for a in axes for b in axes} <= split
    assert all(layout.num_ranks <= MAX_RANKS for layout in every_layout())
    spread = [each for each in every_layout(has_experts=True) if each.degrees["ep"] > 1]
    beside = [{name for name in axes if each.degrees[name] > 1} for each in spread]
    assert all(any(axis in each for each in beside) for axis in axes)
    assert any(len(each) == 3 for each in beside), "four dimensions on eight ranks"
    assert all(each.num_ranks <= MAX_RANKS for each in spread)
    given = parse_layouts(["tp=2", "all", "tp=2"])
    assert given[0].text == "tp=2"
    assert len(given) == len(texts)


def test_a_step_has_micro_batches_for_every_way_of_sharing_them() -> None:
    texts = {"tp=8": 4, "dp=2": 4, "dp=3": 5, "dp=2,fsdp=2": 8, "pp=2": 4, "fsdp=2,pp=4": 8}
    assert {text: parse_layout(text).num_micro_batches for text in texts} == texts


def test_the_plan_of_a_large_cluster_keeps_its_shape() -> None:
    architecture = published("llama-3.1-405b")
    cluster = ClusterConfig(nodes=2048, gpus_per_node=8, gpu="h100-80gb")
    plan = plan_model_training(architecture, cluster, model="llama-3.1-405b")
    layout, told = scaled_down(plan, architecture)
    assert layout.degrees == {"dp": 1, "fsdp": 2, "tp": 2, "pp": 2, "cp": 1, "ep": 1}
    assert (layout.zero, layout.schedule) == (1, plan.pipeline_schedule)
    assert layout.recompute == plan.recompute
    assert "TP 8, PP 4, DP 512, ZeRO-1" in told
    assert f"Run here as {layout.text} on 8" in told


@pytest.mark.parametrize(
    ("name", "given", "num_gpus", "text"),
    [
        ("smollm2-135m", LayoutConfig(tensor_parallel_size=3), 3, "tp=3"),
        ("llama-2-7b", LayoutConfig(zero_stage=0), 7, "dp=2"),
        ("llama-2-7b", LayoutConfig(zero_stage=2, data_parallel_replicas=2), 16, None),
        ("qwen3-0.6b", LayoutConfig(tensor_parallel_size=16), 16, "tp=4"),  # 8 key-value heads
        ("llama-2-7b", LayoutConfig(), 1, "dp=1"),
    ],
)
def test_degrees_scale_to_the_least_that_keeps_their_meaning(
    name: str, given: LayoutConfig, num_gpus: int, text: str | None
) -> None:
    architecture = published(name)
    cluster = ClusterConfig(nodes=1, gpus_per_node=num_gpus, gpu=gpu("b200"))
    train = TrainConfig(sequence_length=48 * 16, micro_batch_size=1)
    plan = plan_training(architecture, cluster, train, given)
    layout, _ = scaled_down(plan, architecture)
    assert layout.text == (text or "dp=2,fsdp=2,zero=2")
