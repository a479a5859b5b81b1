"""OLMoE: experts in every layer, queries and keys normed before the head split, then clamped."""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families.dense import (
    TINY,
    ClassDefaults,
    grouped_attention_of,
    read_dense,
    write_dense,
)
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.routed import experts_of, read_experts, routed_rules, write_experts

DEFAULTS = ClassDefaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
"""Source: transformers 5.24, OlmoeConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of an OlmoeForCausalLM."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    # Its norms are as wide as the heads would be without a head_dim.
    reader.neutral("head_dim", None, hidden_size // num_heads)
    reader.neutral("sliding_window", None)
    has_bias = reader.boolean("attention_bias", False)
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


FAMILIES = (
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=routed_rules,
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
