"""Architectures to plan: dense ones through the catalog, mixtures of experts built by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MlpConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.catalog import model_config_json
from herder.families.registry import architecture_from_hf

Published = Callable[[str], ArchitectureConfig]

_SHAPES: dict[str, dict[str, Any]] = {
    # vocabulary, hidden, layers, dense layers and their width, attention, experts
    "mixtral-8x7b": {
        "sizes": (32_000, 4096, 32, 0, None),
        "attention": {"heads": 32, "kv_heads": 8, "head_dim": 128},
        "moe": {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 14_336},
    },
    "qwen3-30b-a3b": {
        "sizes": (151_936, 2048, 48, 0, None),
        "attention": {"heads": 32, "kv_heads": 4, "head_dim": 128, "qk_norm": "head"},
        "moe": {"num_experts": 128, "num_experts_per_token": 8, "expert_intermediate_size": 768},
    },
    "qwen1.5-moe-a2.7b": {
        "sizes": (151_936, 2048, 24, 0, None),
        "attention": {"heads": 16, "kv_heads": 16, "head_dim": 128, "qkv_bias": True},
        "moe": {
            "num_experts": 60,
            "num_experts_per_token": 4,
            "expert_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "shared_expert_gate": True,
        },
    },
    "olmoe-1b-7b": {
        "sizes": (50_304, 2048, 16, 0, None),
        "attention": {"heads": 16, "kv_heads": 16, "head_dim": 128, "qk_norm": "projection"},
        "moe": {"num_experts": 64, "num_experts_per_token": 8, "expert_intermediate_size": 1024},
    },
    "gpt-oss-20b": {
        "sizes": (201_088, 2880, 24, 0, None),
        "attention": {
            "heads": 64,
            "kv_heads": 8,
            "head_dim": 64,
            "qkv_bias": True,
            "output_bias": True,
            "sinks": True,
        },
        "moe": {
            "num_experts": 32,
            "num_experts_per_token": 4,
            "expert_intermediate_size": 2880,
            "router_bias": True,
            "expert_bias": True,
        },
    },
    "deepseek-v2-lite": {
        "sizes": (102_400, 2048, 27, 1, 10_944),
        "attention": {"heads": 16, "q_lora_rank": None},
        "moe": {
            "num_experts": 64,
            "num_experts_per_token": 6,
            "expert_intermediate_size": 1408,
            "shared_expert_intermediate_size": 2816,
        },
    },
    "deepseek-v3": {
        "sizes": (129_280, 7168, 61, 3, 18_432),
        "attention": {"heads": 128, "q_lora_rank": 1536},
        "moe": {
            "num_experts": 256,
            "num_experts_per_token": 8,
            "expert_intermediate_size": 2048,
            "shared_expert_intermediate_size": 2048,
            "correction_bias": True,
        },
    },
    "200b-moe": {
        "sizes": (128_000, 6144, 48, 0, None),
        "attention": {"heads": 48, "kv_heads": 8, "head_dim": 128},
        "moe": {"num_experts": 64, "num_experts_per_token": 4, "expert_intermediate_size": 3456},
    },
}


def _attention(heads: int, **given: Any) -> GroupedQueryAttention | LatentAttention:
    if "q_lora_rank" in given:
        return LatentAttention(
            num_attention_heads=heads,
            q_lora_rank=given["q_lora_rank"],
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            scale=192**-0.5,
        )
    kv_heads, head_dim = given.pop("kv_heads"), given.pop("head_dim")
    return GroupedQueryAttention(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        **given,
    )


def build_moe(name: str) -> ArchitectureConfig:
    """A published mixture of experts, as far as planning needs it."""
    shape = _SHAPES[name]
    vocab_size, hidden_size, num_layers, num_dense, width = shape["sizes"]
    dense, routed = LayerSpec(), LayerSpec(feed_forward="routed")
    return ArchitectureConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=32_768,
        norm=NormConfig(eps=1e-6),
        tie_embeddings=False,
        attention=_attention(**dict(shape["attention"])),
        ropes=(RopeConfig(theta=1e6, rotary_dim=64),),
        mlp=None if width is None else MlpConfig(intermediate_size=width),
        moe=MoeConfig(scoring="softmax", normalize_weights=True, **shape["moe"]),
        layers=(dense,) * num_dense + (routed,) * (num_layers - num_dense),
    )


@pytest.fixture
def published() -> Published:
    """The architecture of a catalog name, or of a mixture of experts above."""

    def find(name: str) -> ArchitectureConfig:
        if name in _SHAPES:
            return build_moe(name)
        return architecture_from_hf(model_config_json(name), name=name)

    return find
