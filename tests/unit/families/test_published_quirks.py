"""What sets the dense families apart, each on the smallest change of a published config."""

from __future__ import annotations

from typing import Any

import pytest

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LayerSpec
from herder.config.catalog import model_config_json
from herder.errors import ConfigError
from herder.families.registry import architecture_from_hf

SLIDING = LayerSpec(attention="sliding", window=4096)


def read(name: str, *, drop: str | None = None, **changes: Any) -> ArchitectureConfig:
    config = {**model_config_json(name), **changes}
    if drop is not None:
        config.pop(drop, None)
    return architecture_from_hf(config, name=name)


def attention(architecture: ArchitectureConfig) -> GroupedQueryAttention:
    assert isinstance(architecture.attention, GroupedQueryAttention)
    return architecture.attention


def test_llama_2_has_as_many_key_value_heads_as_query_heads_and_theta_10000() -> None:
    for drop in (None, "num_key_value_heads"):
        architecture = read("llama-2-7b", drop=drop)
        assert attention(architecture).num_key_value_heads == 32
        assert architecture.ropes[0].theta == 10_000.0
    assert attention(read("llama-2-7b", num_key_value_heads=None)).num_key_value_heads == 32


def test_llama_biases_are_on_the_output_projection_too() -> None:
    biased = attention(read("llama-3-8b", attention_bias=True))
    assert (biased.qkv_bias, biased.output_bias) == (True, True)
    mlp = read("llama-3-8b", mlp_bias=True).mlp
    assert mlp is not None
    assert mlp.bias


def test_llama_heads_must_divide_the_hidden_size_even_with_a_head_dim() -> None:
    with pytest.raises(ConfigError, match="does not divide hidden_size=4096"):
        read("llama-3-8b", num_attention_heads=24, head_dim=128)


def test_interleaved_rope_under_a_llama_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope_interleaved is true"):
        read("smollm2-135m", rope_interleaved=True)


def test_an_absent_mistral_window_is_4096_keys_and_a_null_one_is_none() -> None:
    absent = read("mistral-7b-v0.3", drop="sliding_window")
    assert set(absent.layers) == {SLIDING}
    assert set(read("mistral-7b-v0.3", sliding_window=None).layers) == {LayerSpec()}
    assert set(read("mistral-7b-v0.1").layers) == {SLIDING}


def test_absent_mistral_key_value_heads_are_8_and_null_ones_are_the_query_heads() -> None:
    assert attention(read("mistral-7b-v0.1", drop="num_key_value_heads")).num_key_value_heads == 8
    null = read("mistral-7b-v0.1", num_key_value_heads=None)
    assert attention(null).num_key_value_heads == 32


def test_nemos_heads_are_narrower_than_its_hidden_size_says() -> None:
    assert attention(read("mistral-nemo-base-2407")).head_dim == 128
    assert attention(read("mistral-nemo-base-2407", head_dim=None)).head_dim == 160


def test_a_mistral_with_layer_types_is_a_ministral() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    assert read("mistral-7b-v0.1", layer_types=types).layers == (LayerSpec(), SLIDING) * 16


def test_qwen2_has_biases_on_q_k_and_v_only() -> None:
    qwen = attention(read("qwen2.5-7b"))
    assert (qwen.qkv_bias, qwen.output_bias) == (True, False)


def test_a_qwen_window_that_is_switched_off_does_nothing() -> None:
    published = model_config_json("qwen2.5-7b")
    assert published["sliding_window"] is not None
    assert set(read("qwen2.5-7b").layers) == {LayerSpec()}


def test_a_qwen_window_slides_from_max_window_layers_on() -> None:
    changes = {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096}
    layers = read("qwen2.5-7b", **changes).layers
    assert layers == (LayerSpec(),) * 20 + (SLIDING,) * 8


def test_qwen_layer_types_win_over_max_window_layers() -> None:
    types = ["sliding_attention", "full_attention"] * 14
    changes = {"use_sliding_window": True, "sliding_window": 4096, "layer_types": types}
    assert read("qwen2.5-7b", **changes).layers == (SLIDING, LayerSpec()) * 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "1 entries, num_hidden_layers=28"),
        ({"layer_types": ["linear_attention"] * 28}, "has linear_attention"),
        ({"layer_types": ["sliding_attention"] * 28}, "absent or switched off"),
    ],
)
def test_qwen_layer_types_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("qwen2.5-7b", **changes)


def test_qwen3_norms_heads_of_128_unless_told_otherwise() -> None:
    qwen = attention(read("qwen3-8b", drop="head_dim"))
    assert (qwen.qk_norm, qwen.head_dim, qwen.qkv_bias) == ("head", 128, False)
    assert attention(read("qwen3-8b", attention_bias=True)).output_bias


def test_qwen2_heads_are_hidden_size_over_heads() -> None:
    assert attention(read("qwen2.5-0.5b")).head_dim == 64
