from __future__ import annotations

from collections.abc import Callable

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import model_config_json, model_names
from herder.families.registry import architecture_from_hf
from herder.plan.parameters import (
    active_parameter_count,
    layer_weights,
    parameter_count,
    parameters_by_module,
)

Published = Callable[[str], ArchitectureConfig]

COUNTS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-base-2407": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
"""Of the transformers model built on the meta device."""

MOE_COUNTS = {
    "mixtral-8x7b-v0.1": (46_702_792_704, 12_879_925_248),
    "mixtral-8x22b-v0.1": (140_620_634_112, 39_152_031_744),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "qwen1.5-moe-a2.7b": (14_315_784_192, 2_689_173_504),
    "olmoe-1b-7b-0924": (6_919_161_856, 1_282_017_280),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
}
"""All parameters, and those that one token meets."""

TEXT_COUNTS = {
    "llama-4-scout-17b-16e": (107_769_861_120, 17_172_894_720),
    "llama-4-scout-17b-16e-instruct": (107_769_861_120, 17_172_894_720),
    "llama-4-maverick-17b-128e-instruct": (400_711_848_960, 17_184_691_200),
}
"""Of their text models alone, as transformers builds them."""


def read(name: str) -> ArchitectureConfig:
    return architecture_from_hf(model_config_json(name), name=name)


@pytest.mark.parametrize("name", COUNTS)
def test_the_count_of_a_dense_model_is_exact(name: str) -> None:
    architecture = read(name)
    assert parameter_count(architecture) == COUNTS[name]
    assert active_parameter_count(architecture) == COUNTS[name]


@pytest.mark.parametrize("name", MOE_COUNTS)
def test_the_counts_of_a_mixture_of_experts_are_exact(name: str) -> None:
    architecture = read(name)
    counts = parameter_count(architecture), active_parameter_count(architecture)
    assert counts == MOE_COUNTS[name]


@pytest.mark.parametrize("name", TEXT_COUNTS)
def test_the_counts_of_a_vision_models_text_are_exact(name: str) -> None:
    text = architecture_from_hf(model_config_json(name)["text_config"], name=name)
    counts = parameter_count(text), active_parameter_count(text)
    assert counts == TEXT_COUNTS[name]


def test_every_published_model_without_vision_is_counted() -> None:
    seeing = {name for name in model_names() if "vision_config" in model_config_json(name)}
    assert {*model_names()} - seeing == COUNTS.keys() | MOE_COUNTS.keys()


def test_a_tied_head_counts_once(published: Published) -> None:
    tied = published("smollm2-135m")
    untied = tied.model_copy(update={"tie_embeddings": False})
    matrix = tied.vocab_size * tied.hidden_size
    assert parameter_count(untied) - parameter_count(tied) == matrix
    assert "head" not in parameters_by_module(tied)


def test_branch_norms_add_two_vectors_a_layer(published: Published) -> None:
    plain = published("smollm2-135m")
    normed = plain.model_copy(update={"branch_norm": True})
    added = parameter_count(normed) - parameter_count(plain)
    assert added == 2 * plain.num_layers * plain.hidden_size


def test_modules_add_up(published: Published) -> None:
    architecture = published("deepseek-v3")
    assert sum(parameters_by_module(architecture).values()) == parameter_count(architecture)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_hold_everything_once_but_what_is_copied(tp: int, published: Published) -> None:
    architecture = published("llama-3-8b")
    for weight in layer_weights(architecture, architecture.layers[0]):
        local = weight.local_parameters(tp=tp, ep=1, num_key_value_heads=8)
        copies = local * tp / weight.num_parameters
        assert copies == (tp if weight.module == "norms" else 1)


def test_fewer_key_value_heads_than_ranks_are_all_held_and_one_is_used(
    published: Published,
) -> None:
    architecture = published("llama-3-8b")
    split = [w for w in layer_weights(architecture, architecture.layers[0]) if w.split == "kv_out"]
    assert len(split) == 2
    for weight in split:
        at_8, at_16 = (
            weight.local_parameters(tp=tp, ep=1, num_key_value_heads=8) for tp in (8, 16)
        )
        assert (at_8, at_16) == (weight.num_parameters / 8, weight.num_parameters)
        used = [weight.used_shape(tp=tp, num_key_value_heads=8) for tp in (8, 16)]
        assert used == [(128, 4096), (128, 4096)]
