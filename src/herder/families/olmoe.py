"""OLMoE: experts in every layer, queries and keys normed before the head split, then clamped."""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import dense, routed
from herder.families.family import Family
from herder.families.reading import ConfigReader

DEFAULTS = dense.ClassDefaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
"""Source: transformers 5.24, OlmoeConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of an OlmoeForCausalLM."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    # Its norms are as wide as the heads would be without a head_dim.
    reader.neutral("head_dim", None, hidden_size // num_heads)
    reader.neutral("sliding_window", None)
    has_bias = reader.boolean("attention_bias", False)
    moe = routed.read_experts(
        reader,
        width_key="intermediate_size",
        aux_loss=0.01,
        scoring="softmax",
        normalize_weights=reader.boolean("norm_topk_prob", False),
    )
    return dense.read(
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
    attention = dense.grouped_attention_of(architecture)
    return {
        **dense.write(architecture),
        **routed.write_experts(architecture, width_key="intermediate_size"),
        "norm_topk_prob": routed.experts_of(architecture).normalize_weights,
        "attention_bias": attention.output_bias,
        "clip_qkv": attention.clip_qkv,
    }


FAMILIES = (
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=routed.decoder_rules,
        tiny={
            **dense.TINY,
            "hidden_size": 48,
            "intermediate_size": 28,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "clip_qkv": 1.5,
        },
    ),
)
