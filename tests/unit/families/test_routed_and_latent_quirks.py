"""What sets families with experts, latent attention or mixed layers apart, by single keys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MoeConfig,
    NoiseConfig,
)
from herder.config.catalog import model_config_json
from herder.errors import ConfigError
from herder.families.registry import architecture_from_hf, architecture_to_hf, families

SLIDING = LayerSpec(attention="sliding", window=4096)


def read(name: str, *, drop: str | None = None, **changes: Any) -> ArchitectureConfig:
    """A published config, or a family's tiny one, with keys changed."""
    known = families().get(name)
    config = {**(known.tiny_config() if known else model_config_json(name)), **changes}
    config.pop(drop or "", None)
    return architecture_from_hf(config, name=name)


def scout(**changes: Any) -> ArchitectureConfig:
    text = model_config_json("llama-4-scout-17b-16e")["text_config"]
    return architecture_from_hf({**text, **changes}, name="scout")


def moe_of(architecture: ArchitectureConfig) -> MoeConfig:
    assert architecture.moe is not None
    return architecture.moe


def routed(architecture: ArchitectureConfig) -> list[int]:
    return [i for i, layer in enumerate(architecture.layers) if layer.feed_forward == "routed"]


def latent(architecture: ArchitectureConfig) -> LatentAttention:
    assert isinstance(architecture.attention, LatentAttention)
    return architecture.attention


def grouped(architecture: ArchitectureConfig) -> GroupedQueryAttention:
    assert isinstance(architecture.attention, GroupedQueryAttention)
    return architecture.attention


def test_where_every_layer_is_routed_the_dense_width_means_nothing() -> None:
    assert read("qwen3-30b-a3b").mlp is None
    assert read("mixtral-8x7b-v0.1").mlp is None
    assert moe_of(read("mixtral-8x7b-v0.1")).expert_intermediate_size == 14_336
    assert read("qwen3-30b-a3b", drop="intermediate_size") == read("qwen3-30b-a3b")
    with pytest.raises(ConfigError, match="intermediate_size is missing"):
        read("qwen3-30b-a3b", drop="intermediate_size", mlp_only_layers=[0])


def test_absent_norm_eps_and_loss_coefficient_are_those_of_olmoes_class() -> None:
    olmoe = read("olmoe-1b-7b-0924", drop="router_aux_loss_coef")
    assert (olmoe.norm.eps, moe_of(olmoe).aux_loss_coefficient) == (1e-5, 0.01)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b-0924", "mixtral-8x7b-v0.1"])
def test_the_number_of_experts_has_two_names_that_must_agree(name: str) -> None:
    count = moe_of(read(name)).num_experts
    names = ("num_experts", "num_local_experts")
    for kept, dropped in (names, names[::-1]):
        assert read(name, drop=dropped, **{kept: count}) == read(name)
    with pytest.raises(ConfigError, match="are one number, but here they differ"):
        read(name, num_experts=8, num_local_experts=7)


def test_a_missing_size_of_experts_is_never_a_default() -> None:
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        with pytest.raises(ConfigError, match=f"{key} is missing"):
            read("qwen1.5-moe-a2.7b", drop=key)


def test_more_experts_a_token_than_there_are_is_a_config_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_token=9 exceeds num_experts=8"):
        read("mixtral-8x7b-v0.1", num_experts_per_tok=9)


def test_experts_of_a_trained_model_can_be_chosen_more_or_fewer_at_a_time() -> None:
    assert moe_of(read("qwen3-30b-a3b", num_experts_per_tok=4)).num_experts_per_token == 4


def test_sparse_steps_and_dense_lists_pick_the_routed_layers() -> None:
    step = read(
        "qwen1.5-moe-a2.7b", decoder_sparse_step=3, mlp_only_layers=[5], num_hidden_layers=9
    )
    assert routed(step) == [2, 8]
    assert step.mlp is not None
    assert step.mlp.intermediate_size == 5632


def test_a_qwen2_moe_window_slides_even_layers_below_the_limit() -> None:
    changes = {"use_sliding_window": True, "max_window_layers": 5, "sliding_window": 4096}
    slides = [layer.window for layer in read("qwen1.5-moe-a2.7b", **changes).layers[:7]]
    assert slides == [4096, None, 4096, None, 4096, None, None]


def test_a_qwen3_moe_window_slides_all_layers_and_only_when_switched_on() -> None:
    on = read("qwen3-30b-a3b", sliding_window=4096, use_sliding_window=True, max_window_layers=3)
    assert {layer.window for layer in on.layers} == {4096}
    assert {layer.window for layer in read("qwen3-30b-a3b", sliding_window=4096).layers} == {None}


def test_keys_of_training_alone_go_both_ways_and_are_written_only_where_they_say_something() -> (
    None
):
    noise = {"std": 0.1, "decay_steps": 500}
    noisy = read("mixtral", router_z_loss_coef=0.001, router_noise=noise)
    moe = moe_of(noisy)
    assert (moe.z_loss_coefficient, moe.noise) == (0.001, NoiseConfig(std=0.1, decay_steps=500))
    assert architecture_from_hf(architecture_to_hf(noisy, family="mixtral"), name="x") == noisy
    plain = architecture_to_hf(read("mixtral"), family="mixtral")
    assert not {"router_z_loss_coef", "router_noise", "router_bias_update_rate"} & plain.keys()
    moving = read("deepseek_v3", router_bias_update_rate=0.001)
    assert moe_of(moving).correction_bias_update_rate == 0.001
    assert (
        architecture_from_hf(architecture_to_hf(moving, family="deepseek_v3"), name="x") == moving
    )
    with pytest.raises(ConfigError, match="router_bias_update_rate"):
        read("mixtral", router_bias_update_rate=0.001)


def test_scouts_temperature_switch_is_a_number_and_its_rope_pairs_neighbours() -> None:
    model = scout()
    temperature = grouped(model).temperature
    assert temperature is not None
    assert (temperature.scale, temperature.floor_tokens) == (0.1, 8192)
    assert model.ropes[0].interleaved
    assert grouped(scout(attn_temperature_tuning=0)).temperature is None
    assert [layer.temperature for layer in model.layers[:4]] == [False, False, False, True]


def test_no_rope_layers_says_who_rotates_and_an_empty_list_means_the_default_in_llama_4() -> None:
    assert scout(no_rope_layers=[]).layers == scout().layers
    assert scout(no_rope_layers=None).layers == scout().layers
    rotates = [layer.rope is not None for layer in scout().layers]
    assert rotates == [True, True, True, False] * 12
    kinds = [layer.attention for layer in scout().layers[:4]]
    assert kinds == ["chunked", "chunked", "chunked", "full"]


def test_llama_4_alternates_dense_and_routed_layers_of_two_widths() -> None:
    text = model_config_json("llama-4-maverick-17b-128e-instruct")["text_config"]
    maverick = architecture_from_hf(text, name="maverick")
    assert routed(maverick) == list(range(1, 48, 2))
    assert maverick.mlp is not None
    widths = maverick.mlp.intermediate_size, moe_of(maverick).expert_intermediate_size
    assert widths == (16_384, 8192)
    assert grouped(maverick).qk_norm == "none"
    assert moe_of(maverick).weight_on_input


def test_an_empty_list_of_rotating_layers_is_refused_in_smollm3() -> None:
    with pytest.raises(ConfigError, match="no_rope_layers has 0 entries, num_hidden_layers=4"):
        read("smollm3", no_rope_layers=[])


def test_a_null_query_rank_is_no_query_latent() -> None:
    assert latent(read("deepseek-v2-lite")).q_lora_rank is None
    assert latent(read("deepseek-v3")).q_lora_rank == 1536


@pytest.mark.parametrize(("name", "weight"), [("deepseek-v2-lite", 0.707), ("deepseek-v3", 1.0)])
def test_latent_attention_is_scaled_by_the_square_of_mscale(name: str, weight: float) -> None:
    model = read(name)
    mscale = 0.1 * weight * math.log(40) + 1
    assert latent(model).scale == pytest.approx(192**-0.5 * mscale**2, rel=1e-12)
    assert getattr(model.ropes[0].scaling, "attention_factor", None) == 1.0
    plain = read(name, rope_scaling=None)
    assert latent(plain).scale == 192**-0.5


def test_deepseek_v2_never_normalizes_and_knows_groups_only_by_its_method() -> None:
    model = moe_of(read("deepseek-v2-lite", norm_topk_prob=True, n_group=8, topk_group=3))
    assert (model.normalize_weights, model.num_groups) == (False, 1)
    changes = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    limited = moe_of(read("deepseek-v2-lite", **changes))
    assert (limited.num_groups, limited.num_groups_per_token, limited.group_score) == (8, 3, "max")


def test_deepseek_v3_scores_by_sigmoid_in_groups_with_a_bias_for_the_choice() -> None:
    moe = moe_of(read("deepseek-v3"))
    assert (moe.scoring, moe.correction_bias, moe.group_score) == ("sigmoid", True, "top2_sum")
    assert (moe.num_groups, moe.num_groups_per_token, moe.routed_scaling_factor) == (8, 4, 2.5)
    assert routed(read("deepseek-v3")) == list(range(3, 61))
    assert not read("deepseek-v3", rope_interleave=False).ropes[0].interleaved


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v2-lite", {"scoring_func": "sigmoid"}),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}),
        ("deepseek-v2-lite", {"num_key_value_heads": 4}),
        ("deepseek-v3", {"topk_method": "greedy"}),
        ("olmoe-1b-7b-0924", {"head_dim": 64}),
        ("olmoe-1b-7b-0924", {"sliding_window": 512}),
        ("gpt-oss-20b", {"hidden_act": "gelu"}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("phi3", {"mlp_bias": True}),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(name: str, changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(ConfigError, match=f"{key} is .* nothing else is supported"):
        read(name, **changes)


def test_gpt_oss_without_rope_keys_is_yarn_whose_ends_are_not_rounded() -> None:
    published = read("gpt-oss-20b")
    scaling = published.ropes[0].scaling
    assert scaling == read("gpt-oss-20b", drop="rope_scaling").ropes[0].scaling
    assert scaling.kind == "yarn"
    assert not scaling.truncate
    assert [layer.window for layer in published.layers[:2]] == [128, None]
    assert read("gpt-oss-20b", drop="layer_types").layers == published.layers


def test_ministral_3_needs_its_section_and_ministral_slides_by_default() -> None:
    with pytest.raises(ConfigError, match="rope_parameters is missing"):
        read("ministral3", drop="rope_parameters")
    by_default = read("ministral", drop="layer_types")
    assert {layer.window for layer in by_default.layers} == {8}


def test_gemma_3_has_a_table_for_full_and_one_for_sliding_layers() -> None:
    model = read(
        "gemma3_text", sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8}
    )
    assert [layer.rope for layer in model.layers] == [1, 0, 1]
    full, sliding = model.ropes
    assert (full.scaling.kind, sliding.scaling.kind) == ("linear", "default")
    assert (full.theta, sliding.theta) == (500_000.0, 100.0)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8},
        "sliding_attention": {"rope_type": "default"},
    }
    both = read("gemma3_text", sliding_window_pattern=2, rope_parameters=nested)
    assert both == model, "as versions between the two spellings wrote it"


def test_gemmas_norms_add_one_and_its_embeddings_grow_with_the_width() -> None:
    model = read("gemma2")
    assert (model.norm.weight_offset, model.norm.multiply_in_fp32, model.branch_norm) == (
        1,
        True,
        True,
    )
    assert model.embedding_scale == 48**0.5
    assert grouped(model).scale == 10**-0.5
    assert model.tie_embeddings


def test_phi_3_rotates_part_of_a_head_and_its_window_before_scaling_stands_outside() -> None:
    section = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = read("phi3", rope_scaling=section, original_max_position_embeddings=64)
    assert model.ropes[0].rotary_dim == 8
    assert getattr(model.ropes[0].scaling, "original_max_position_embeddings", None) == 64
    by_default = read("phi3", rope_scaling=section)
    assert getattr(by_default.ropes[0].scaling, "original_max_position_embeddings", None) == 4096
