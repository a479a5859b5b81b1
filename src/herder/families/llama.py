"""Llama 2, 3, 3.1, 3.2 (text) and models of their shape such as SmolLM2.

Biases, where there are any, are on q, k, v and o alike; so are those of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.families.dense import (
    ClassDefaults,
    dense_rules,
    full_attention_layers,
    read_dense,
    write_dense,
)
from herder.families.family import Family
from herder.families.reading import ConfigReader

DEFAULTS = ClassDefaults(max_position_embeddings=2048)
"""Source: transformers 5.24, LlamaConfig."""


def from_hf(config: Mapping[str, Any], where: str) -> ArchitectureConfig:
    """The architecture of a LlamaForCausalLM."""
    reader = ConfigReader(config, where=where)
    keys = read_dense(reader, DEFAULTS)
    attention_bias = reader.boolean("attention_bias", False)
    mlp_bias = reader.boolean("mlp_bias", False)
    # pretraining_tp split a matmul and never changed its result; the other two are SmolLM2's.
    reader.ignore("pretraining_tp", "is_llama_config")
    reader.neutral("rope_interleaved", False)
    if keys.hidden_size % keys.num_attention_heads and not reader.problems:
        reader.problem(
            f"num_attention_heads={keys.num_attention_heads} does not divide "
            f"hidden_size={keys.hidden_size}; Llama requires it even where head_dim is given"
        )
    reader.finish()
    return keys.architecture(
        full_attention_layers(keys.num_hidden_layers),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    attention, mlp = architecture.attention, architecture.mlp
    assert isinstance(attention, GroupedQueryAttention), "dense families have no latent attention"
    assert mlp is not None, "dense families have a feed-forward of their own"
    return {
        **write_dense(architecture),
        "attention_bias": attention.output_bias,
        "mlp_bias": mlp.bias,
    }


def tiny_config() -> dict[str, Any]:
    """Grouped heads, untied, theta of Llama 3."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 160,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "initializer_range": 0.2,
    }


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        from_hf=from_hf,
        to_hf=to_hf,
        weight_rules=dense_rules,
        tiny_config=tiny_config,
    ),
)
