from __future__ import annotations

import math
from typing import Any

import pytest

from herder.config.architecture import (
    DefaultScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from herder.errors import ConfigError
from herder.families.reading import ConfigReader
from herder.families.rope import read_rope, write_rope

HEAD_DIM, WINDOW = 8, 128


def rope(**config: Any) -> RopeConfig:
    reader = ConfigReader(config, where="test")
    read = read_rope(reader, head_dim=HEAD_DIM, max_position_embeddings=WINDOW)
    reader.finish()
    return read


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 5}, 5.0),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, 7.0),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0),
        ({"rope_theta": 5.0, "rope_scaling": {}}, 5.0),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "default"}}, 5.0),
    ],
)
def test_theta_is_found_wherever_it_stands(config: dict[str, Any], theta: float) -> None:
    assert rope(**config) == RopeConfig(theta=theta, rotary_dim=HEAD_DIM, scaling=DefaultScaling())


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_scaling_is_read_from_both_keys_in_both_spellings(key: str, kind: str) -> None:
    assert rope(**{key: {kind: "linear", "factor": 4}}).scaling == LinearScaling(factor=4.0)


def test_rope_type_wins_over_type() -> None:
    section = {"type": "yarn", "rope_type": "linear", "factor": 2.0}
    assert rope(rope_scaling=section).scaling == LinearScaling(factor=2.0)


def test_two_mappings_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep only the right one"):
        rope(
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        )


def test_dynamic_stretches_from_the_models_window_whatever_else_is_said() -> None:
    section = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
    wanted = DynamicScaling(factor=2.0, original_max_position_embeddings=WINDOW)
    assert rope(rope_scaling=section).scaling == wanted


def yarn(**fields: Any) -> YarnScaling:
    scaling = rope(rope_scaling={"type": "yarn", "factor": 4.0, **fields}).scaling
    assert isinstance(scaling, YarnScaling)
    return scaling


def test_yarn_without_an_original_window_starts_from_the_models() -> None:
    assert yarn().original_max_position_embeddings == WINDOW
    assert yarn(original_max_position_embeddings=32).original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarns_attention_factor_comes_from_whatever_is_given(
    fields: dict[str, Any], factor: float
) -> None:
    assert yarn(**fields).attention_factor == pytest.approx(factor, rel=1e-12)


def test_yarn_betas_may_be_null() -> None:
    assert (yarn(beta_fast=None).beta_fast, yarn(beta_slow=None).beta_slow) == (32.0, 1.0)


def test_llama3_needs_both_frequency_factors() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling\.high_freq_factor is missing"):
        rope(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0})


def test_llama3_is_read() -> None:
    section = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    }
    assert rope(rope_scaling=section).scaling == Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )


def longrope(**fields: Any) -> LongRopeScaling:
    section = {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}
    scaling = rope(
        rope_scaling={**section, "original_max_position_embeddings": 32, **fields}
    ).scaling
    assert isinstance(scaling, LongRopeScaling)
    return scaling


def test_longropes_attention_factor_comes_from_the_ratio_of_windows() -> None:
    assert longrope().attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    assert longrope(factor=1.0).attention_factor == 1.0
    assert longrope(attention_factor=1.25).attention_factor == 1.25


def test_su_is_an_old_name_of_longrope() -> None:
    assert longrope(type="su") == longrope()


def test_a_factor_list_of_the_wrong_length_is_told_with_both_lengths() -> None:
    with pytest.raises(ConfigError, match="short_factor has 3 entries, rotary_dim=8 needs 4"):
        longrope(short_factor=[1, 1, 1])


def test_an_unknown_kind_gets_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling\.type is \"ntk\"; .* yarn"):
        rope(rope_scaling={"type": "ntk", "factor": 2.0})


def test_an_unknown_key_of_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling\.fector=2\.0"):
        rope(rope_scaling={"type": "linear", "factor": 2.0, "fector": 2.0})


def test_an_odd_head_cannot_rotate() -> None:
    reader = ConfigReader({}, where="test")
    read_rope(reader, head_dim=7, max_position_embeddings=WINDOW)
    with pytest.raises(ConfigError, match="rotary_dim=7 must be even"):
        reader.finish()


def test_part_of_a_head_rotates_only_where_transformers_would_not_do_it_either() -> None:
    assert rope(partial_rotary_factor=0.5).rotary_dim == HEAD_DIM
    with pytest.raises(ConfigError, match="rotates whole heads"):
        rope(partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    "scaling",
    [
        DefaultScaling(),
        LinearScaling(factor=2.0),
        DynamicScaling(factor=2.0, original_max_position_embeddings=WINDOW),
        YarnScaling(
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=1.1,
        ),
        Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        LongRopeScaling(
            short_factor=(1.0, 1.5, 2.0, 3.0),
            long_factor=(2.0, 3.0, 4.0, 5.0),
            original_max_position_embeddings=32,
            attention_factor=1.2,
        ),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_what_is_written_is_read_back(scaling: Any) -> None:
    config = RopeConfig(theta=500.0, rotary_dim=HEAD_DIM, scaling=scaling)
    assert rope(**write_rope(config)) == config
