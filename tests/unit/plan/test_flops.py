from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from herder.config.architecture import ArchitectureConfig, LayerSpec
from herder.plan.flops import (
    flops_per_token,
    forward_flops_by_module,
    kv_bytes_per_sequence,
    mean_keys,
)

Published = Callable[[str], ArchitectureConfig]


def keys_seen(layer: LayerSpec, length: int) -> float:
    """By looking at every pair of positions."""
    seen = 0
    for query in range(length):
        for key in range(query + 1):
            in_window = layer.attention != "sliding" or query - key < (layer.window or 0)
            in_chunk = layer.attention != "chunked" or query // (layer.window or 1) == key // (
                layer.window or 1
            )
            seen += in_window and in_chunk
    return seen / length


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(),
        LayerSpec(attention="sliding", window=5),
        LayerSpec(attention="sliding", window=64),
        LayerSpec(attention="chunked", window=7),
        LayerSpec(attention="chunked", window=8),
    ],
    ids=str,
)
def test_causal_keys_are_those_that_a_mask_lets_through(layer: LayerSpec) -> None:
    assert mean_keys(layer, 32) == pytest.approx(keys_seen(layer, 32))


def test_matrix_products_cost_two_flops_a_parameter(published: Published) -> None:
    architecture = published("llama-2-7b")
    by_module = forward_flops_by_module(architecture, sequence_length=4096)
    products = sum(flops for name, flops in by_module.items() if name != "scores")
    embedding, norms = 32_000 * 4096, (2 * 32 + 1) * 4096
    assert products == 2 * (6_738_415_616 - embedding - norms)


def test_attention_costs_four_flops_a_key_and_dim(published: Published) -> None:
    by_module = forward_flops_by_module(published("llama-2-7b"), sequence_length=4096)
    assert by_module["scores"] == 32 * 4 * 4096 * (4096 + 1) / 2


def test_a_tied_head_still_multiplies(published: Published) -> None:
    by_module = forward_flops_by_module(published("smollm2-135m"), sequence_length=512)
    assert by_module["head"] == 2 * 49_152 * 576


def test_training_is_three_forward_passes(published: Published) -> None:
    architecture = published("qwen3-8b")
    forward = flops_per_token(architecture, sequence_length=2048, phase="forward")
    assert flops_per_token(architecture, sequence_length=2048) == 3 * forward


def test_a_token_pays_for_its_own_experts_only(published: Published) -> None:
    by_module = forward_flops_by_module(published("mixtral-8x7b"), sequence_length=4096)
    assert by_module["experts"] == 32 * 2 * 2 * 3 * 4096 * 14_336
    assert by_module["router"] == 32 * 2 * 8 * 4096


def test_latent_attention_scores_with_nope_and_rope_and_sums_values(published: Published) -> None:
    by_module = forward_flops_by_module(published("deepseek-v3"), sequence_length=4096)
    assert by_module["scores"] == pytest.approx(61 * 2 * 128 * (128 + 64 + 128) * 4097 / 2)


@pytest.mark.parametrize(
    ("name", "tp", "width", "expected"),
    [
        ("llama-2-7b", 1, 2, 2 * 32 * 32 * 128 * 2),
        ("llama-2-7b", 8, 2, 65_536),
        ("llama-3.1-405b", 8, 1, 32_256),
        ("llama-3-8b", 1, 2, 131_072),
        ("llama-3-8b", 16, 2, 2 * 32 * 1 * 128 * 2),
        ("deepseek-v3", 1, 2, 61 * (512 + 64) * 2),
        ("deepseek-v3", 8, 2, 61 * (512 + 64) * 2),
    ],
)
def test_cache_bytes_a_token(
    name: str, tp: int, width: int, expected: int, published: Published
) -> None:
    architecture = published(name)
    found = kv_bytes_per_sequence(
        architecture,
        layers=Counter(architecture.layers),
        num_tokens=1,
        bytes_per_element=width,
        tensor_parallel_size=tp,
    )
    assert found == expected


def test_a_sliding_window_caps_what_a_sequence_keeps(published: Published) -> None:
    mistral = published("mistral-7b-v0.1")
    layers = Counter(mistral.layers)
    short, window, long = (
        kv_bytes_per_sequence(mistral, layers=layers, num_tokens=n, bytes_per_element=2)
        for n in (2048, 4096, 32_768)
    )
    assert 2 * short == window == long
