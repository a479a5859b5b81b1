"""Rotary tables: precision, growth, and the kinds that depend on the text's length."""

import math

import pytest
import torch

from herder.config.architecture import (
    DynamicScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from herder.model.rope import Rope, inverse_frequencies, rotate

PLAIN = RopeConfig(theta=1e4, rotary_dim=8)
LONG = RopeConfig(
    theta=1e4,
    rotary_dim=8,
    scaling=LongRopeScaling(
        short_factor=(1.0, 1.5, 2.0, 3.0),
        long_factor=(4.0, 6.0, 8.0, 12.0),
        original_max_position_embeddings=16,
        attention_factor=1.2,
    ),
)
DYNAMIC = RopeConfig(
    theta=1e4,
    rotary_dim=8,
    scaling=DynamicScaling(factor=2.0, original_max_position_embeddings=16),
)


def tables(config: RopeConfig, positions: list[int], context: list[int] | None = None):
    context_T = None if context is None else torch.tensor(context)
    longest = max(positions) + 1 if context is None else max(context)
    return Rope(config).tables(torch.tensor(positions), longest=longest, context_T=context_T)


def test_distant_positions_keep_their_angles_in_a_bfloat16_model(make_decoder):
    decoder = make_decoder().to(torch.bfloat16)
    place = decoder.ropes[0].tables(torch.tensor([30_000]), longest=30_001, context_T=None)
    exact = 30_000 * 1e4 ** (-torch.arange(0, 6, 2).double() / 6)
    assert place.cos_TR.dtype == torch.float32
    torch.testing.assert_close(place.cos_TR[0].double(), exact.cos(), atol=2e-3, rtol=0)
    torch.testing.assert_close(place.sin_TR[0].double(), exact.sin(), atol=2e-3, rtol=0)


def test_a_table_grows_past_its_end_and_keeps_what_it_had():
    rope = Rope(PLAIN)
    before = rope.tables(torch.tensor([3]), longest=4, context_T=None)
    beyond = rope.tables(torch.tensor([3, 5000]), longest=5001, context_T=None)
    assert torch.equal(beyond.cos_TR[0], before.cos_TR[0])
    torch.testing.assert_close(beyond.cos_TR[1, 0].item(), math.cos(5000.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("config", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_documents_neighbours_do_not_change_its_angles(config):
    alone = tables(config, [0, 7], [8, 8])
    beside_a_longer_one = tables(config, [0, 7, 40], [8, 8, 41])
    assert torch.equal(beside_a_longer_one.cos_TR[:2], alone.cos_TR)
    assert not torch.equal(beside_a_longer_one.cos_TR[2], tables(PLAIN, [40]).cos_TR[0])


def test_longrope_takes_the_long_factors_once_past_the_original_window():
    within, past = tables(LONG, [5], [16]), tables(LONG, [5], [17])
    plain_R = inverse_frequencies(PLAIN)
    short_R = torch.tensor(LONG.scaling.short_factor)
    long_R = torch.tensor(LONG.scaling.long_factor)
    torch.testing.assert_close(within.cos_TR[0], (5 * plain_R / short_R).cos() * 1.2)
    torch.testing.assert_close(past.cos_TR[0], (5 * plain_R / long_R).cos() * 1.2)


def test_dynamic_scaling_is_plain_within_the_window_and_stretches_with_the_text():
    assert torch.equal(tables(DYNAMIC, [5], [16]).cos_TR, tables(PLAIN, [5]).cos_TR)
    theta = 1e4 * (2 * 24 / 16 - 1) ** (8 / 6)
    expected_R = 5 * theta ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(tables(DYNAMIC, [5], [24]).cos_TR[0], expected_R.cos())


def test_yarn_keeps_fast_dims_and_divides_slow_ones():
    scaling = YarnScaling(factor=8.0, original_max_position_embeddings=4096, attention_factor=1.2)
    config = RopeConfig(theta=1e4, rotary_dim=64, scaling=scaling)
    ratio_R = inverse_frequencies(RopeConfig(theta=1e4, rotary_dim=64)) / inverse_frequencies(
        config
    )
    assert ratio_R[0] == pytest.approx(1.0)
    assert ratio_R[-1] == pytest.approx(8.0)
    assert (ratio_R.diff() >= -1e-5).all()


def test_equal_low_and_high_factors_of_llama_4_give_no_nan():
    scaling = Llama3Scaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=64
    )
    config = RopeConfig(theta=1e4, rotary_dim=16, scaling=scaling)
    ratio_R = inverse_frequencies(RopeConfig(theta=1e4, rotary_dim=16)) / inverse_frequencies(
        config
    )
    assert set(ratio_R.round().tolist()) == {1.0, 16.0}


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_keeps_lengths_and_depends_on_distance_only(interleaved):
    config = RopeConfig(theta=1e4, rotary_dim=6, interleaved=interleaved)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        rotated_q = rotate(q, tables(config, [query_position]))
        rotated_k = rotate(k, tables(config, [key_position]))
        assert rotated_q.norm().item() == pytest.approx(q.norm().item(), rel=1e-6)
        assert torch.equal(rotated_q[..., 6:], q[..., 6:])
        return (rotated_q * rotated_k).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
