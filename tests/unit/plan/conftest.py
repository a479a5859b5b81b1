"""Architectures to plan: those of the catalog, and one that is in none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.catalog import catalog_name, model_config_json
from herder.families.registry import architecture_from_hf

Published = Callable[[str], ArchitectureConfig]

MOE_200B = ArchitectureConfig(
    vocab_size=128_000,
    hidden_size=6144,
    max_position_embeddings=32_768,
    norm=NormConfig(eps=1e-6),
    tie_embeddings=False,
    attention=GroupedQueryAttention(
        num_attention_heads=48, num_key_value_heads=8, head_dim=128, scale=128**-0.5
    ),
    ropes=(RopeConfig(theta=1e6, rotary_dim=128),),
    mlp=None,
    moe=MoeConfig(
        num_experts=64,
        num_experts_per_token=4,
        expert_intermediate_size=3456,
        scoring="softmax",
        normalize_weights=True,
    ),
    layers=(LayerSpec(feed_forward="routed"),) * 48,
)


@pytest.fixture
def published() -> Published:
    """The architecture that a catalog name means, or 200b-moe."""

    def find(name: str) -> ArchitectureConfig:
        if name == "200b-moe":
            return MOE_200B
        known = catalog_name(name)
        assert known is not None, name
        return architecture_from_hf(model_config_json(known), name=known)

    return find
