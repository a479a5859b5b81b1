from __future__ import annotations

from typing import Any

import pytest

from herder.config.catalog import model_config_json
from herder.config.quantization import WeightQuantization
from herder.families.registry import architecture_from_hf, family_of
from herder.plan.parameters import Weight
from herder.plan.weight_format import WeightFormat, published_format, quantized_format


def format_of(config: dict[str, Any]) -> WeightFormat | None:
    architecture = architecture_from_hf(config, name="x")
    rules = family_of(config).weight_rules(architecture)
    return published_format(config, rules, where="x")


def quantized(name: str, **quantization: Any) -> WeightFormat | None:
    return format_of({**model_config_json(name), "quantization_config": quantization})


def test_plain_weights_have_no_format_of_their_own() -> None:
    assert format_of(model_config_json("llama-3-8b")) is None


def test_gpt_oss_stores_experts_in_four_bits_and_a_shared_exponent() -> None:
    found = format_of(model_config_json("gpt-oss-120b"))
    assert found == WeightFormat("mxfp4", 2, {"experts": 0.5 + 1 / 32})


def test_deepseek_v3_stores_all_layers_in_fp8_blocks() -> None:
    found = format_of(model_config_json("deepseek-v3"))
    assert found is not None
    assert found.name == "fp8"
    modules = ("attention", "feed_forward", "experts", "shared_expert")
    assert found.matrix_bytes == dict.fromkeys(modules, 1 + 4 / 128**2)


def test_four_bits_bring_a_scale_and_a_zero_point_a_group() -> None:
    found = quantized("qwen3-30b-a3b", quant_method="awq", bits=4, group_size=128)
    assert found is not None
    assert found.name == "awq-int4"
    assert found.matrix_bytes["experts"] == pytest.approx(0.5 + 2.5 / 128)


def test_modules_that_are_left_out_stay_plain() -> None:
    found = quantized(
        "mixtral-8x7b-v0.1",
        quant_method="fp8",
        weight_block_size=None,
        modules_to_not_convert=["model.layers.*.self_attn"],
    )
    assert found == WeightFormat("fp8", 2, {"experts": 1})


def test_a_format_that_cannot_be_read_is_left_to_the_loader() -> None:
    assert quantized("llama-3-8b", quant_method="bitsandbytes") is None


def test_biases_and_norms_take_what_the_rest_does() -> None:
    mxfp4 = WeightFormat("mxfp4", 2, {"experts": 0.5})
    assert mxfp4.bytes_of(Weight("experts", (8, 4), copies=2)) == 0.5
    assert mxfp4.bytes_of(Weight("experts", (8,), copies=2)) == 2
    assert mxfp4.bytes_of(Weight("attention", (8, 4))) == 2


def test_quantized_as_loaded_a_matrix_is_counted_as_it_lies() -> None:
    found = quantized_format(WeightQuantization("int4", 64))
    assert found.bytes_of(Weight("attention", (8, 96))) * 96 == 128 / 2 + 2 * 4
    assert found.bytes_of(Weight("attention", (8,))) == 2
    assert found.bytes_of(Weight("embedding", (8, 96))) == found.bytes_of(Weight("head", (8, 96)))
    assert found.bytes_of(Weight("router", (8, 96))) == 4
    assert found.bytes_of(Weight("attention", (8, 96), stays_wide=True)) == 2
