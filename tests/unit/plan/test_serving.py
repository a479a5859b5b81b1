from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig
from herder.errors import PlanError
from herder.plan.parameters import parameter_count
from herder.plan.serving import ServingPlan, gpus_needed, plan_serving
from herder.plan.weight_format import WeightFormat

Published = Callable[[str], ArchitectureConfig]

NODE = ClusterConfig(nodes=1, gpus_per_node=8, gpu="h100-80gb")


def test_llama_2_7b_over_eight_gpus(published: Published) -> None:
    plan = plan_serving(
        published("llama-2-7b"),
        NODE,
        model="llama-2-7b",
        context_tokens=8192,
        tensor_parallel_size=8,
    )
    assert plan.weight_dtype == plan.kv_cache_dtype == "bf16"
    assert plan.weights_gb_per_gpu == pytest.approx(1.7, abs=0.05)
    assert plan.kv_cache_gb_per_gpu == pytest.approx(66.3, abs=0.05)
    assert plan.kv_bytes_per_token_per_gpu == 65_536
    assert plan.max_concurrent_sequences == 123
    assert any("beyond the 4,096 positions" in note for note in plan.notes)


def test_the_405b_model_falls_back_to_fp8(published: Published) -> None:
    plan = plan_serving(published("llama-3.1-405b"), NODE, model="405b", context_tokens=8192)
    assert plan.layout.tensor_parallel_size == 8
    assert plan.weight_dtype == plan.kv_cache_dtype == "fp8"
    assert plan.weights_gb_per_gpu == pytest.approx(50.7, abs=0.05)
    assert 17.2 <= plan.kv_cache_gb_per_gpu <= 17.4
    assert plan.max_concurrent_sequences == 65
    assert plan.max_concurrent_sequences_bf16_ends == 63
    assert re.search(r"bf16 is a wall: 101\.5 GB of weights a GPU at TP 8", plan.notes[0])
    assert "65 sequences" in plan.notes[1]
    assert "63 when embedding and head stay in bf16" in plan.notes[1]


@pytest.mark.parametrize(
    ("name", "fewest", "most"),
    [
        ("llama-3-8b", 1, 1),
        ("llama-3-70b", 2, 4),
        ("mixtral-8x7b", 1, 2),
        ("qwen3-30b-a3b", 1, 1),
        ("200b-moe", 4, 8),
        ("deepseek-v3", 8, 16),
    ],
)
def test_the_quick_rule_on_180_gb_gpus(
    name: str, fewest: int, most: int, published: Published
) -> None:
    weights = 2 * parameter_count(published(name))
    assert fewest <= gpus_needed(weights, 180e9) <= most


def test_a_long_context_needs_more_gpus_by_the_rule(published: Published) -> None:
    short, long = (
        plan_serving(published("llama-3-70b"), NODE, model="m", context_tokens=n).gpus_needed_rule
        for n in (8192, 131_072)
    )
    assert long > short


def test_the_smallest_degree_that_fits_is_chosen(published: Published) -> None:
    small = plan_serving(published("llama-2-7b"), NODE, model="m")
    large = plan_serving(published("llama-3-70b"), NODE, model="m")
    assert (small.layout.tensor_parallel_size, small.layout.data_parallel_size) == (1, 8)
    assert (large.layout.tensor_parallel_size, large.layout.data_parallel_size) == (4, 2)


def test_without_fp8_units_pipeline_stages_are_next(published: Published) -> None:
    on = ClusterConfig(nodes=2, gpus_per_node=8, gpu="a100-80gb")
    plan = plan_serving(published("llama-3.1-405b"), on, model="405b")
    assert plan.weight_dtype == "bf16"
    assert plan.layout.pipeline_parallel_size == 2
    assert plan.kv_bytes_per_token_per_gpu == 2 * 63 * 128 * 2


@pytest.mark.parametrize(
    ("name", "tp", "shape"),
    [
        ("llama-2-7b", 1, "single-GPU dense"),
        ("llama-2-7b", 2, "TP dense"),
        ("olmoe-1b-7b", 1, "single-GPU MoE"),
        ("mixtral-8x7b", 4, "TP MoE"),
        ("deepseek-v2-lite", 8, "MLA + MoE"),
    ],
)
def test_the_distribution_shape_is_named(
    name: str, tp: int, shape: str, published: Published
) -> None:
    plan = plan_serving(published(name), NODE, model=name, tensor_parallel_size=tp)
    assert plan.distribution_shape == shape


def test_experts_beyond_tensor_parallelism_are_spread_over_copies_of_attention(
    published: Published,
) -> None:
    on = ClusterConfig(nodes=2, gpus_per_node=4, gpu="a100-80gb")
    plan = plan_serving(published("200b-moe"), on, model="200b")
    layout = plan.layout
    assert (layout.tensor_parallel_size, layout.expert_parallel_size) == (4, 8)
    assert (layout.data_parallel_size, layout.pipeline_parallel_size) == (2, 1)
    assert plan.distribution_shape == "DP attention + EP MoE"
    experts, router, norms = 48 * 64 * 3 * 6144 * 3456, 48 * 64 * 6144, (2 * 48 + 1) * 6144
    split = 201_509_640_192 - experts - router - norms
    on_rank = experts / 8 + split / 4 + router + norms
    assert plan.weights_gb_per_gpu == pytest.approx(2 * on_rank / 1e9)
    each = (68e9 - 2 * on_rank) // (8192 * 48 * 2 * 2 * 128 * 2)
    assert plan.max_concurrent_sequences == 2 * each


def test_latent_attention_stands_whole_beside_spread_experts(published: Published) -> None:
    on = ClusterConfig(nodes=2, gpus_per_node=8, gpu="h100-80gb")
    plan = plan_serving(published("deepseek-v3"), on, model="deepseek-v3")
    layout = plan.layout
    assert (layout.tensor_parallel_size, layout.expert_parallel_size) == (1, 16)
    assert (layout.data_parallel_size, layout.num_replicas) == (16, 1)
    assert plan.distribution_shape == "MLA + MoE"
    experts = 58 * 256 * 3 * 7168 * 2048
    on_rank = 671_026_404_352 - experts + experts / 16
    assert plan.weights_gb_per_gpu == pytest.approx(on_rank / 1e9)
    assert plan.kv_bytes_per_token_per_gpu == 61 * (512 + 64)
    assert plan.max_concurrent_sequences == 16 * ((68e9 - on_rank) // (8192 * 61 * 576))
    assert any("16 copies of attention, TP 1 each, have 34" in note for note in plan.notes)


def test_gpus_that_experts_do_not_divide_into_stay_unused(published: Published) -> None:
    on = ClusterConfig(nodes=5, gpus_per_node=8, gpu="h100-80gb")
    plan = plan_serving(published("deepseek-v3"), on, model="m")
    assert (plan.layout.expert_parallel_size, plan.layout.num_replicas) == (16, 2)
    assert plan.layout.data_parallel_size == 32
    assert plan.notes[-1] == "8 of 40 GPUs stay unused."


def test_what_copies_of_a_latent_cost_is_told(published: Published) -> None:
    on = ClusterConfig(nodes=1, gpus_per_node=8, gpu="b200")
    plan = plan_serving(published("deepseek-v3"), on, model="m")
    assert plan.layout.tensor_parallel_size == 8
    told = "Data-parallel attention, experts over the same 8 GPUs, would hold 1,504"
    assert any(told in note for note in plan.notes)
    assert not any("EP" in note for note in plan.notes)


def test_weights_are_served_as_published_where_no_dtype_fits(published: Published) -> None:
    experts = 24 * 32 * 3 * 2880 * 2880
    mxfp4 = WeightFormat("mxfp4", 2, {"experts": 4.25 / 8})
    plan = plan_serving(
        published("gpt-oss-20b"),
        ClusterConfig(nodes=1, gpus_per_node=1, gpu="rtx4090"),
        model="gpt-oss-20b",
        published=mxfp4,
    )
    assert (plan.weight_dtype, plan.kv_cache_dtype) == ("mxfp4", "fp8")
    taken = 2 * (20_914_757_184 - experts) + experts * 4.25 / 8
    assert plan.weights_gb_per_gpu == pytest.approx(taken / 1e9)
    assert plan.gpus_needed_rule == 1
    assert [note.split(" is a wall")[0] for note in plan.notes[:2]] == ["bf16", "fp8"]
    roomy = plan_serving(published("gpt-oss-20b"), NODE, model="gpt-oss-20b", published=mxfp4)
    assert roomy.weight_dtype == "bf16"
    assert any(
        f"hold mxfp4: served as it is, weights take {taken / 1e9:.1f}" in n for n in roomy.notes
    )


def test_decoding_reads_the_weights_a_token_meets_and_one_row_of_the_embedding(
    published: Published,
) -> None:
    dense = plan_serving(published("llama-3-8b"), NODE, model="m")
    read = 2 * (8_030_261_248 - 128_256 * 4096)
    assert dense.decode_tokens_per_second_limit == pytest.approx(3350e9 / read)
    routed = plan_serving(published("mixtral-8x7b"), NODE, model="m")
    read = 2 * (12_879_925_248 - 32_000 * 4096) / 2
    assert routed.layout.tensor_parallel_size == 2
    assert routed.decode_tokens_per_second_limit == pytest.approx(3350e9 / read)


def test_mla_keeps_its_latent_on_every_rank(published: Published) -> None:
    narrow, wide = (
        plan_serving(published("deepseek-v2-lite"), NODE, model="m", tensor_parallel_size=tp)
        for tp in (1, 8)
    )
    assert narrow.kv_bytes_per_token_per_gpu == wide.kv_bytes_per_token_per_gpu
    assert any("keeps a copy" in note for note in wide.notes)


def test_a_window_caps_what_a_sequence_takes(published: Published) -> None:
    plan = plan_serving(published("mistral-7b-v0.1"), NODE, model="m", context_tokens=32_768)
    assert plan.kv_gb_per_sequence_per_gpu == pytest.approx(4096 * 131_072 / 1e9)


@pytest.mark.parametrize(
    ("name", "degree", "told"),
    [
        ("qwen2.5-7b", 8, r"does not divide num_attention_heads=28 .*Legal here: 1, 2, 4\."),
        ("llama-3-8b", 3, r"does not divide num_attention_heads=32"),
        ("llama-3-8b", 16, r"does not divide num_key_value_heads=8"),
        ("llama-2-7b", 16, r"does not divide a node of 1 x 8 GPUs"),
    ],
)
def test_an_illegal_degree_is_refused(
    name: str, degree: int, told: str, published: Published
) -> None:
    with pytest.raises(PlanError, match=told):
        plan_serving(published(name), NODE, model=name, tensor_parallel_size=degree)


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("llama-3-70b", ClusterConfig(nodes=1, gpus_per_node=1)),
        ("llama-3.1-405b", ClusterConfig(nodes=1, gpus_per_node=8, gpu="a100-80gb")),
        ("llama-3.1-405b", ClusterConfig(nodes=1, gpus_per_node=2, gpu="rtx4090")),
        ("deepseek-v3", ClusterConfig(nodes=1, gpus_per_node=8)),
        ("qwen3-8b", ClusterConfig(nodes=1, gpus_per_node=1, gpu=gpu("cpu"))),
    ],
)
def test_when_nothing_fits_the_cluster_that_is_named_would_do(
    name: str, on: ClusterConfig, published: Published
) -> None:
    with pytest.raises(PlanError) as refused:
        plan_serving(published(name), on, model=name)
    told = re.search(r"--nodes (\d+) --gpus-per-node (\d+) --gpu (\S+)\.$", str(refused.value))
    assert told, str(refused.value)
    device = on.gpu if told[3] == "cpu" else told[3]
    larger = ClusterConfig(nodes=int(told[1]), gpus_per_node=int(told[2]), gpu=device)
    plan = plan_serving(published(name), larger, model=name)
    assert plan.max_concurrent_sequences >= 1


def test_weights_and_one_sequence_always_fit_the_budget(published: Published) -> None:
    for name in ("llama-2-7b", "llama-3-70b", "llama-3.1-405b", "qwen3-30b-a3b"):
        plan = plan_serving(published(name), NODE, model=name)
        taken = plan.weights_gb_per_gpu + plan.kv_gb_per_sequence_per_gpu
        assert taken <= plan.budget_gb_per_gpu
        assert plan.weights_gb_per_gpu + plan.kv_cache_gb_per_gpu == pytest.approx(68.0)


def test_a_plan_survives_json(published: Published) -> None:
    plan = plan_serving(published("llama-3.1-405b"), NODE, model="m")
    assert ServingPlan.model_validate_json(plan.model_dump_json()) == plan
