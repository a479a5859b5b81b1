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


def test_windows_on_every_other_layer_count_their_own_keys(published: Published) -> None:
    """gpt-oss: 12 layers of 128 keys and 12 that see all; sinks are no keys and are not counted."""
    by_module = forward_flops_by_module(published("gpt-oss-20b"), sequence_length=8192)
    in_window = (128 * 129 / 2 + (8192 - 128) * 128) / 8192
    keys = 12 * in_window + 12 * 8193 / 2
    assert by_module["scores"] == pytest.approx(4 * 64 * 64 * keys)


def test_chunks_start_again_every_so_many_tokens(published: Published) -> None:
    """Llama 4: three of four layers see their chunk of 8,192, the fourth everything."""
    gpt_oss = published("gpt-oss-20b")
    chunk, whole = LayerSpec(attention="chunked", window=8192), LayerSpec(rope=None)
    layers = tuple(whole if index % 4 == 3 else chunk for index in range(48))
    routed = tuple(layer.model_copy(update={"feed_forward": "routed"}) for layer in layers)
    scout = gpt_oss.model_copy(update={"layers": routed})
    by_module = forward_flops_by_module(scout, sequence_length=3 * 8192)
    keys = 36 * 8193 / 2 + 12 * (3 * 8192 + 1) / 2
    assert by_module["scores"] == pytest.approx(4 * 64 * 64 * keys)
    kept = kv_bytes_per_sequence(
        scout, layers=Counter(routed), num_tokens=3 * 8192, bytes_per_element=2
    )
    assert kept == (36 + 3 * 12) * 8192 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("name", "routed", "experts", "shared"),
    [
        ("qwen3-30b-a3b", 48 * 2 * 128 * 2048, 48 * 8 * 2 * 3 * 2048 * 768, 0),
        (
            "deepseek-v3",
            58 * 2 * 256 * 7168,
            58 * 8 * 2 * 3 * 7168 * 2048,
            58 * 2 * 3 * 7168 * 2048,
        ),
        (
            "qwen1.5-moe-a2.7b",
            24 * 2 * 60 * 2048,
            24 * 4 * 2 * 3 * 2048 * 1408,
            24 * 2 * (3 * 2048 * 5632 + 2048),
        ),
    ],
)
def test_routers_chosen_experts_and_the_shared_one(
    name: str, routed: int, experts: int, shared: int, published: Published
) -> None:
    by_module = forward_flops_by_module(published(name), sequence_length=4096)
    assert by_module["router"] == routed
    assert by_module["experts"] == experts
    assert by_module.get("shared_expert", 0) == shared


def test_latent_projections_of_deepseek_v3(published: Published) -> None:
    by_module = forward_flops_by_module(published("deepseek-v3"), sequence_length=4096)
    queries = 7168 * 1536 + 1536 * 128 * 192
    latent = 7168 * 576 + 512 * 128 * 256
    assert by_module["attention"] == 61 * 2 * (queries + latent + 128 * 128 * 7168)


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
        ("gpt-oss-120b", 1, 2, 36 * 2 * 8 * 64 * 2),
        ("qwen3-235b-a22b", 8, 1, 94 * 2 * 1 * 128),
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
