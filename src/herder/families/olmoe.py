"""OLMoE: experts in every layer, queries and keys normed before the head split, then clamped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families.dense import (
    NORMS,
    TINY,
    ClassDefaults,
    attention_rules,
    grouped_attention_of,
    in_layers,
    read_dense,
    rules_of,
    with_feed_forwards,
    write_dense,
)
from herder.families.family import Family
from herder.families.layer_types import equal_layers
from herder.families.reading import ConfigReader
from herder.families.routed import expert_rules, experts_of, read_experts, write_experts
from herder.families.weights import WeightRules

DEFAULTS = ClassDefaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
"""Source: transformers 5.24, OlmoeConfig."""


def from_hf(config: Mapping[str, Any], where: str) -> ArchitectureConfig:
    """The architecture of an OlmoeForCausalLM."""
    reader = ConfigReader(config, where=where)
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    # Its norms are as wide as the heads would be without a head_dim.
    reader.neutral("head_dim", None, hidden_size // num_heads)
    reader.neutral("sliding_window", None)
    has_bias = reader.boolean("attention_bias", False)
    layers = equal_layers(reader, None)
    moe = read_experts(
        reader,
        width_key="intermediate_size",
        aux_loss=0.01,
        scoring="softmax",
        normalize_weights=reader.boolean("norm_topk_prob", False),
    )
    return read_dense(
        reader,
        DEFAULTS,
        layers=with_feed_forwards(layers, routed=range(len(layers))),
        attention={
            "qkv_bias": has_bias,
            "output_bias": has_bias,
            "qk_norm": "projection",
            "clip_qkv": reader.optional_number("clip_qkv"),
        },
        moe=moe,
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    attention = grouped_attention_of(architecture)
    return {
        **write_dense(architecture),
        **write_experts(architecture, width_key="intermediate_size"),
        "norm_topk_prob": experts_of(architecture).normalize_weights,
        "attention_bias": attention.output_bias,
        "clip_qkv": attention.clip_qkv,
    }


def weight_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names."""
    return rules_of(
        architecture,
        *attention_rules(architecture),
        *expert_rules(architecture),
        *in_layers(NORMS),
    )


FAMILIES = (
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        from_hf=from_hf,
        to_hf=to_hf,
        weight_rules=weight_rules,
        tiny={
            **TINY,
            "hidden_size": 48,
            "intermediate_size": 28,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "clip_qkv": 1.5,
        },
    ),
)
