"""OLMoE: experts in every layer, queries and keys normed before the head split, then clamped."""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, names
from herder.families.family import Family
from herder.families.reading import ConfigReader

HF_CLASS = keys.HfClass(
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    attention_bias=False,
    norm_topk_prob=False,
    router_aux_loss_coef=0.01,
    expert_width="intermediate_size",
)
"""Source: transformers 5.24, OlmoeConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of an OlmoeForCausalLM."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    # Its norms are as wide as the heads would be without a head_dim.
    reader.neutral("head_dim", None, hidden_size // num_heads)
    reader.neutral("sliding_window", None)
    return keys.read(
        reader,
        HF_CLASS,
        attention={"qk_norm": "projection", "clip_qkv": reader.optional_number("clip_qkv")},
        moe={"scoring": "softmax"},
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    return {
        **keys.write(architecture, HF_CLASS),
        "clip_qkv": keys.attention_of(architecture).clip_qkv,
    }


FAMILIES = (
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=names.decoder_rules,
        tiny={
            **keys.TINY,
            "hidden_size": 48,
            "intermediate_size": 28,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "clip_qkv": 1.5,
        },
    ),
)
