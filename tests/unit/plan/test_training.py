from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig, LayoutConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.candidate import Request
from herder.plan.layout import MAX_DATA_PARALLEL_RANKS
from herder.plan.search import layouts_by_simplicity
from herder.plan.stages import ModelSizes
from herder.plan.training import Objective, TrainingPlan, plan_model_training, plan_training

Published = Callable[[str], ArchitectureConfig]

NODE = ClusterConfig(nodes=1, gpus_per_node=8, gpu="h100-80gb")
CPU = ClusterConfig(nodes=1, gpus_per_node=1, gpu=gpu("cpu"))


def cluster(nodes: int, gpus_per_node: int = 8, device: str = "h100-80gb") -> ClusterConfig:
    known = CPU.gpu if device == "cpu" else device
    return ClusterConfig(nodes=nodes, gpus_per_node=gpus_per_node, gpu=known)


def test_llama_2_7b_needs_no_more_than_zero_1_on_one_node(published: Published) -> None:
    plan = plan_model_training(published("llama-2-7b"), NODE, model="llama-2-7b")
    layout = plan.layout
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (1, 1)
    assert (layout.data_parallel_size, layout.zero_stage) == (8, 1)
    assert plan.memory_gb.state == pytest.approx(37.1, abs=0.05)
    assert plan.rejected == ()


def test_the_405b_model_on_16384_gpus(published: Published) -> None:
    plan = plan_model_training(published("llama-3.1-405b"), cluster(2048), model="405b")
    layout = plan.layout
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (8, 4)
    assert (layout.data_parallel_size, layout.zero_stage) == (512, 1)
    assert 50.9 <= plan.memory_gb.state <= 51.1
    assert plan.memory_gb.largest_rank_state >= 51.3
    assert plan.memory_gb.total <= plan.memory_gb.budget


def test_zero_3_alone_fits_the_405b_model_and_is_refused_for_communication(
    published: Published,
) -> None:
    plan = plan_model_training(published("llama-3.1-405b"), cluster(2048), model="405b")
    reasons = {entry.layout: entry.reason for entry in plan.rejected}
    assert "fits memory" in reasons["DP 16,384, ZeRO-3"]
    assert "16,384 data-parallel ranks; the cap is 512" in reasons["DP 16,384, ZeRO-3"]
    assert "needs" in reasons["DP 16,384, ZeRO-2"]


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("llama-3-8b", NODE),
        ("llama-3-70b", cluster(8)),
        ("qwen2.5-72b", cluster(16, device="a100-80gb")),
        ("llama-3.1-405b", cluster(32, device="gb200")),
        ("qwen3-30b-a3b", cluster(2)),
        ("deepseek-v3", cluster(32)),
        ("smollm2-135m", cluster(1, 2, "rtx4090")),
    ],
)
@pytest.mark.parametrize("objective", ["simplest", "fastest"])
def test_every_plan_keeps_the_rules(
    name: str, on: ClusterConfig, objective: Objective, published: Published
) -> None:
    plan = plan_model_training(published(name), on, model=name, objective=objective)
    layout = plan.layout
    assert layout.num_ranks == on.num_gpus
    assert plan.memory_gb.total <= plan.memory_gb.budget
    assert layout.num_shards <= MAX_DATA_PARALLEL_RANKS
    assert sum(plan.layers_per_stage) == published(name).num_layers
    assert 0 < plan.model_flops_utilization < 1
    assert 0 < plan.reliability.goodput < 1
    assert sum(share.parameters for share in plan.modules) == plan.parameters
    step = plan.step_time_seconds.model_dump()
    assert step.pop("total") == pytest.approx(sum(step.values()))
    micro_batches = plan.num_micro_batches * layout.data_parallel_size
    assert plan.global_batch_tokens == plan.micro_batch_tokens * micro_batches


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b"])
def test_the_fastest_plan_is_at_least_as_fast_at_the_same_batch(
    name: str, published: Published
) -> None:
    simplest = plan_model_training(published(name), NODE, model=name)
    fastest = plan_model_training(published(name), NODE, model=name, objective="fastest")
    assert fastest.global_batch_tokens <= simplest.global_batch_tokens
    assert fastest.tokens_per_second >= simplest.tokens_per_second
    assert re.search(r"simulated 1\.\d\d x the throughput", fastest.adjustments[-1])


@pytest.mark.parametrize(
    ("name", "on", "ep", "zero_stage"),
    [
        ("mixtral-8x7b", cluster(4), 8, 1),
        ("qwen3-30b-a3b", cluster(2), 4, 1),
        ("gpt-oss-20b", NODE, 4, 1),
        ("olmoe", NODE, 1, 1),
    ],
)
def test_a_mixture_of_experts_spreads_them_before_it_gathers_them(
    name: str, on: ClusterConfig, ep: int, zero_stage: int, published: Published
) -> None:
    plan = plan_model_training(published(name), on, model=name)
    assert (plan.layout.expert_parallel_size, plan.layout.zero_stage) == (ep, zero_stage)
    assert plan.layout.tensor_parallel_size == plan.layout.pipeline_parallel_size == 1


def test_experts_are_spread_within_nodes_first_where_ranks_share_sequences(
    published: Published,
) -> None:
    train = TrainConfig(sequence_length=8192)
    request = Request(ModelSizes(published("mixtral-8x7b")), cluster(2, 4), train)
    shared = [
        (layout.zero_stage, layout.expert_parallel_size)
        for layout in layouts_by_simplicity(request)
        if (layout.context_parallel_size, layout.tensor_parallel_size) == (2, 1)
    ]
    near = [(stage, ep) for stage in (1, 2) for ep in (1, 2, 4)]
    assert shared == [*near, (1, 8), (2, 8), (3, 1), (3, 2), (3, 4), (3, 8)]


@pytest.mark.parametrize(
    ("name", "on", "shape"),
    [
        ("smollm2-135m", cluster(1, 1), "single-GPU dense"),
        ("llama-2-7b", NODE, "DP dense"),
        ("olmoe", NODE, "DP MoE"),
        ("llama-3.1-405b", cluster(2048), "TP dense"),
        ("qwen3-30b-a3b", cluster(2), "DP attention + EP MoE"),
    ],
)
def test_the_shape_of_a_plan_is_named(
    name: str, on: ClusterConfig, shape: str, published: Published
) -> None:
    plan = plan_model_training(published(name), on, model=name)
    assert plan.distribution_shape == shape


def test_stages_alone_have_a_shape_of_their_own(published: Published) -> None:
    given = LayoutConfig(pipeline_parallel_size=2)
    on, train = cluster(1, 2), TrainConfig()
    plan = plan_training(published("smollm2-135m"), on, train, given)
    assert plan.distribution_shape == "PP dense"
    assert plan.layout_reason.startswith("The degrees are given. This one needs ")


def test_a_plan_says_what_would_not_do_with_less_of_each_degree(published: Published) -> None:
    plan = plan_model_training(published("llama-3.1-405b"), cluster(2048), model="405b")
    reason, memory = plan.layout_reason, plan.memory_gb
    assert reason.startswith("TP 8: with less, DP 16,384, ZeRO-3 fits memory (72.9 GB), but")
    assert " PP 4: with less, TP 8, PP 2, DP 1,024, ZeRO-3 fits memory" in reason
    needs = f"This one needs {memory.total:.1f} GB, {memory.budget:.1f} GB may be filled."
    assert reason.endswith(needs)


def test_a_plan_says_which_stage_and_how_far_experts_are_spread(published: Published) -> None:
    plan = plan_model_training(published("qwen3-30b-a3b"), NODE, model="qwen")
    assert plan.layout.told() == "EP 2, DP 8, ZeRO-3"
    for told in (
        "EP 2: with less, DP 8, ZeRO-3 needs 73.7 GB a device, 73.6 GB may be filled.",
        "ZeRO-3: with less, EP 8, DP 8, ZeRO-2 needs 79.5 GB a device, 73.6 GB may be filled.",
    ):
        assert told in plan.layout_reason


def test_what_was_given_or_is_fastest_says_so(published: Published) -> None:
    llama, train = published("llama-3-8b"), TrainConfig(sequence_length=8192, micro_batch_size=1)
    plan = plan_training(llama, NODE, train, LayoutConfig())
    (last,) = plan.rejected
    told = f"The degrees are given. Not with less ZeRO: {last.layout} {last.reason}. This one"
    assert plan.layout_reason.startswith(told)
    plan = plan_model_training(llama, NODE, model="m", objective="fastest")
    second = plan.rejected[0]
    told = f"The fastest by simulation. Next best: {second.layout} {second.reason}. This one"
    assert plan.layout_reason.startswith(told)


def test_the_state_of_modules_follows_how_they_are_shared_out(published: Published) -> None:
    plan = plan_model_training(published("mixtral-8x7b"), cluster(4), model="mixtral-8x7b")
    assert plan.layout.told() == "EP 8, DP 32, ZeRO-1"
    state = {share.module: share.state_gb for share in plan.modules}
    assert sum(state.values()) == pytest.approx(plan.memory_gb.state)
    experts, attention = 32 * 8 * 3 * 4096 * 14_336, 32 * (2 * 4096**2 + 2 * 4096 * 1024)
    assert state["experts"] == pytest.approx(experts / 8 * (4 + 12 / 4) / 1e9)
    assert state["attention"] == pytest.approx(attention * (4 + 12 / 32) / 1e9)


def test_the_fastest_plan_lists_the_next_ones_in_order(published: Published) -> None:
    plan = plan_model_training(published("llama-3-70b"), cluster(4), model="m", objective="fastest")
    slower = [float(re.findall(r"([\d.]+)% slower", e.reason)[0]) for e in plan.rejected]
    assert len(slower) == 5
    assert slower == sorted(slower)
    assert plan.layout.told() not in {entry.layout for entry in plan.rejected}


def test_planning_takes_milliseconds_and_searching_under_a_second(published: Published) -> None:
    def quickest(objective: Objective) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            plan_model_training(architecture, cluster(2048), model="405b", objective=objective)
            times.append(time.process_time() - began)
        return min(times)

    architecture = published("llama-3.1-405b")
    assert quickest("simplest") < 0.1
    assert quickest("fastest") < 1.0


def test_the_same_question_gets_the_same_plan(published: Published) -> None:
    plans = [
        plan_model_training(published("llama-3-70b"), cluster(8), model="m", objective="fastest")
        for _ in range(2)
    ]
    assert plans[0] == plans[1]


def test_a_plan_survives_json(published: Published) -> None:
    plan = plan_model_training(published("llama-3-70b"), cluster(8), model="m")
    assert TrainingPlan.model_validate_json(plan.model_dump_json()) == plan


def test_one_cpu_gets_one_rank(published: Published) -> None:
    train = TrainConfig(sequence_length=512)
    plan = plan_training(published("smollm2-135m"), CPU, train, model="smollm2-135m")
    assert plan.layout.num_ranks == 1
    assert plan.layout.zero_stage == 0
    assert plan.micro_batch_size == 4
    assert plan.global_batch_tokens == 2048
    assert plan.precision.parameters == "fp32"


def test_what_a_recipe_says_is_kept(published: Published) -> None:
    train = TrainConfig(
        sequence_length=256, micro_batch_size=3, global_batch_tokens=1536, precision="fp32"
    )
    plan = plan_training(published("smollm2-135m"), CPU, train, model="smollm2-135m")
    assert (plan.micro_batch_size, plan.num_micro_batches) == (3, 2)
    assert plan.global_batch_tokens == 1536
    assert plan.precision.compute == "fp32"
    assert plan.adjustments == ()


def test_a_planned_micro_batch_divides_the_global_batch(published: Published) -> None:
    train = TrainConfig(sequence_length=512, global_batch_tokens=3 * 1024)
    plan = plan_training(published("smollm2-135m"), CPU, train, model="smollm2-135m")
    assert (plan.micro_batch_size, plan.num_micro_batches) == (2, 3)
    assert plan.adjustments == ()


def test_a_batch_that_is_rounded_is_told(published: Published) -> None:
    train = TrainConfig(sequence_length=512, micro_batch_size=2, global_batch_tokens=1500)
    plan = plan_training(published("smollm2-135m"), CPU, train, model="smollm2-135m")
    assert plan.global_batch_tokens == 2048
    assert "global_batch_tokens 1,500 -> 2,048" in plan.adjustments[0]


def test_a_sequence_beyond_the_window_is_told(published: Published) -> None:
    plan = plan_model_training(
        published("llama-2-7b"), NODE, model="llama-2-7b", sequence_length=8192
    )
    assert "beyond the 4,096 positions" in plan.adjustments[0]


def test_a_recipe_that_forbids_recompute_is_not_given_it(published: Published) -> None:
    train = TrainConfig(sequence_length=8192, micro_batch_size=1)
    chosen = plan_training(published("llama-3-8b"), NODE, train, model="m", chooses_recompute=True)
    kept = plan_training(published("llama-3-8b"), NODE, train, model="m")
    assert (chosen.recompute, chosen.layout.zero_stage) == ("full", 1)
    assert (kept.recompute, kept.layout.zero_stage) == ("none", 2)


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("llama-3-70b", NODE),
        ("llama-3.1-405b", cluster(4)),
        ("llama-2-7b", cluster(1, 1, "rtx4090")),
        ("deepseek-v3", NODE),
        ("qwen2.5-7b", CPU),
    ],
)
def test_when_nothing_fits_the_cluster_that_is_named_would_do(
    name: str, on: ClusterConfig, published: Published
) -> None:
    with pytest.raises(PlanError) as refused:
        plan_model_training(published(name), on, model=name)
    told = re.search(r"--nodes (\d+) --gpus-per-node (\d+) --gpu (\S+)\.$", str(refused.value))
    assert told, str(refused.value)
    larger = cluster(int(told[1]), int(told[2]), told[3])
    assert larger.num_gpus > on.num_gpus
    assert plan_model_training(published(name), larger, model=name).layout.num_ranks > 1


def test_the_refusal_of_a_recipe_names_recompute_where_it_is_off(published: Published) -> None:
    train = TrainConfig(sequence_length=4096)
    on = cluster(1, 1, "rtx4090")
    with pytest.raises(PlanError, match=r"--set train\.recompute=full"):
        plan_training(published("llama-2-7b"), on, train, model="llama-2-7b")


def test_a_given_layout_is_planned_as_given(published: Published) -> None:
    given = LayoutConfig(tensor_parallel_size=2, pipeline_parallel_size=2, zero_stage=3)
    plan = plan_training(published("llama-3-8b"), NODE, TrainConfig(), given, model="m")
    layout = plan.layout
    assert plan.objective == "given"
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (2, 2)
    assert (layout.data_parallel_size, layout.zero_stage) == (2, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            LayoutConfig(tensor_parallel_size=8),
            r"tensor_parallel_size=8 does not divide num_attention_heads=9.*\nLegal .*: 1\.",
        ),
        (LayoutConfig(pipeline_parallel_size=31), "exceeds the 30 layers"),
        (
            LayoutConfig(data_parallel_replicas=3),
            r"data_parallel_replicas=3 must divide the 8 data-parallel.*Legal here: 1, 2, 4\.",
        ),
        (LayoutConfig(data_parallel_replicas=8), r"groups of two or more.*Legal here: 1, 2, 4\."),
        (LayoutConfig(data_parallel_replicas=2, zero_stage=0), r"goes with ZeRO 1 to 3"),
        (LayoutConfig(pipeline_parallel_size=3), r"does not divide the cluster's 8 devices"),
        (LayoutConfig(expert_parallel_size=2), r"expert_parallel_size=2 must divide"),
    ],
)
def test_an_illegal_layout_is_refused_with_legal_ones(
    given: LayoutConfig, told: str, published: Published
) -> None:
    with pytest.raises(PlanError, match=told):
        plan_training(published("smollm2-135m"), NODE, TrainConfig(), given, model="smollm2-135m")


def test_a_given_layout_that_does_not_fit_is_refused_stage_by_stage(published: Published) -> None:
    given = LayoutConfig(tensor_parallel_size=8)
    with pytest.raises(PlanError, match=r"TP 8, ZeRO-0: needs [\d.,]+ GB"):
        plan_training(published("llama-3-70b"), NODE, TrainConfig(), given, model="m")


def test_sequences_that_ranks_cannot_share_evenly_are_refused(published: Published) -> None:
    train = TrainConfig(sequence_length=511)
    told = r"tensor_parallel_size=8 parts.*sequence_length=511 .*\nTry --set .*=512\."
    with pytest.raises(PlanError, match=told):
        plan_training(
            published("llama-3-8b"), NODE, train, LayoutConfig(tensor_parallel_size=8), model="m"
        )


def test_whole_state_sums_gradients_in_fp32_whatever_was_asked(published: Published) -> None:
    train = TrainConfig(sequence_length=512, gradient_dtype="bf16")
    smollm = published("smollm2-135m")
    whole = plan_training(smollm, NODE, train, LayoutConfig(zero_stage=0), model="m")
    assert whole.precision.gradients == "fp32"
    assert whole.adjustments[0].startswith("gradient_dtype bf16 -> fp32: DP 8, ZeRO-0 keeps")
    sharded = plan_training(smollm, NODE, train, LayoutConfig(zero_stage=1), model="m")
    assert (sharded.precision.gradients, sharded.adjustments) == ("bf16", ())
    full = TrainConfig(sequence_length=512, gradient_dtype="fp32")
    sharded = plan_training(smollm, NODE, full, LayoutConfig(zero_stage=1), model="m")
    assert (sharded.precision.gradients, sharded.precision.parameters) == ("fp32", "bf16")


def test_the_fastest_layout_is_not_searched_when_one_is_given(published: Published) -> None:
    with pytest.raises(PlanError, match="layout: auto"):
        plan_training(
            published("smollm2-135m"),
            NODE,
            TrainConfig(),
            LayoutConfig(),
            model="m",
            objective="fastest",
        )
