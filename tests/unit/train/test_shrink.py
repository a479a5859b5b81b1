"""What a model of debug size keeps of the one it stands for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
)
from herder.config.catalog import debug_model_names, model_config_json, model_names
from herder.families.registry import architecture_from_hf, families
from herder.model.build import build_decoder, num_parameters
from herder.plan.layout import tensor_degree_problem
from herder.train.shrink import shrunk

CATALOG = {
    name: architecture_from_hf(model_config_json(name), name=name)
    for name in (*model_names(), *debug_model_names())
    if model_config_json(name)["model_type"] in families()
}
TINY = {
    f"tiny {name}": architecture_from_hf(family.tiny_config(), name=name)
    for name, family in families().items()
}
ALL = CATALOG | TINY
NUMBERS = {
    *("num_attention_heads", "num_key_value_heads", "head_dim", "scale", "temperature"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_experts", "expert_intermediate_size", "shared_expert_intermediate_size"),
}
"""What may change within attention and moe; everything else there is a choice and stays."""

each_model = pytest.mark.parametrize("architecture", ALL.values(), ids=ALL.keys())
each_catalog_model = pytest.mark.parametrize("architecture", CATALOG.values(), ids=CATALOG.keys())


def kind(layer: LayerSpec) -> LayerSpec:
    """A layer without its window's length."""
    return layer.model_copy(update={"window": None if layer.window is None else 1})


@each_model
def test_it_builds_and_is_small(architecture: ArchitectureConfig) -> None:
    small = shrunk(architecture)
    assert ArchitectureConfig.model_validate(small.model_dump()) == small
    assert num_parameters(build_decoder(small)) < 150_000


@each_model
def test_every_kind_of_layer_stays_in_its_order(architecture: ArchitectureConfig) -> None:
    whole = [kind(layer) for layer in architecture.layers]
    small = [kind(layer) for layer in shrunk(architecture).layers]
    assert list(dict.fromkeys(small)) == list(dict.fromkeys(whole))
    assert set(pairwise(small)) >= {pair for pair in pairwise(whole) if pair[0] != pair[1]}
    assert len(small) >= 4


@each_model
def test_every_window_is_shorter_than_a_document(architecture: ArchitectureConfig) -> None:
    windows = {layer.window for layer in architecture.layers} - {None}
    short = {layer.window for layer in shrunk(architecture).layers} - {None}
    assert len(short) == len(windows)
    assert all(window < 20 for window in short)


@each_model
def test_choices_stay(architecture: ArchitectureConfig) -> None:
    small = shrunk(architecture)
    pairs = [(small.attention, architecture.attention)]
    if architecture.moe is not None:
        assert small.moe is not None
        pairs.append((small.moe, architecture.moe))
        assert (small.moe.shared_expert_intermediate_size is None) == (
            architecture.moe.shared_expert_intermediate_size is None
        )
    for ours, theirs in pairs:
        assert ours.model_dump(exclude=NUMBERS) == theirs.model_dump(exclude=NUMBERS)
    for name in ("norm", "tie_embeddings", "branch_norm", "final_logit_softcap"):
        assert getattr(small, name) == getattr(architecture, name)
    assert len(small.ropes) == len(architecture.ropes)


@each_model
def test_a_routers_choice_stays_a_choice(architecture: ArchitectureConfig) -> None:
    moe = shrunk(architecture).moe
    if moe is not None:
        within = moe.num_experts // moe.num_groups * moe.num_groups_per_token
        assert moe.num_experts_per_token < within


@each_catalog_model
def test_tensor_parallel_degrees_stay_legal_or_illegal(architecture: ArchitectureConfig) -> None:
    small = shrunk(architecture)
    for degree in (2, 4):
        whole_problem = tensor_degree_problem(architecture, degree, copies_kv_heads=True)
        small_problem = tensor_degree_problem(small, degree, copies_kv_heads=True)
        assert (small_problem is None) == (whole_problem is None), (whole_problem, small_problem)


def test_head_ratios_stay() -> None:
    heads = {
        name: (attention.num_attention_heads, attention.num_key_value_heads)
        for name in ("llama-2-7b", "llama-3-8b", "llama-3.1-405b", "smollm2-135m", "qwen2.5-7b")
        if isinstance(attention := shrunk(CATALOG[name]).attention, GroupedQueryAttention)
    }
    assert heads == {
        "llama-2-7b": (4, 4),
        "llama-3-8b": (8, 2),
        "llama-3.1-405b": (16, 2),  # 128 to 8, as near as 8 to 1 comes
        "smollm2-135m": (9, 3),
        "qwen2.5-7b": (28, 4),
    }


def test_the_scale_of_attention_follows_the_width_of_a_head() -> None:
    attention = shrunk(CATALOG["llama-3-8b"]).attention
    assert isinstance(attention, GroupedQueryAttention)
    assert attention.scale == pytest.approx(attention.head_dim**-0.5)


def test_latent_ranks_shrink_and_stay_there() -> None:
    with_rank = shrunk(CATALOG["deepseek-v3"]).attention
    without = shrunk(CATALOG["deepseek-v2-lite"]).attention
    assert isinstance(with_rank, LatentAttention)
    assert isinstance(without, LatentAttention)
    assert with_rank.q_lora_rank
    assert without.q_lora_rank is None


def test_partial_rotation_and_lists_of_divisors_keep_their_share() -> None:
    rope = shrunk(TINY["tiny phi3"]).ropes[0]
    assert rope.rotary_dim == 4
    assert rope.scaling.kind == TINY["tiny phi3"].ropes[0].scaling.kind
