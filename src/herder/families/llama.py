"""Llama 2, 3, 3.1, 3.2 (text) and models of their shape such as SmolLM2.

Biases, where there are any, are on q, k, v and o alike; so are those of the feed-forward.
"""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import dense
from herder.families.family import Family
from herder.families.reading import ConfigReader

DEFAULTS = dense.ClassDefaults(max_position_embeddings=2048)
"""Source: transformers 5.24, LlamaConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a LlamaForCausalLM."""
    # pretraining_tp split a matmul and never changed its result; the other two are SmolLM2's.
    reader.ignore("pretraining_tp", "is_llama_config")
    reader.neutral("rope_interleaved", False)
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden_size % num_heads and not reader.problems:
        reader.problem(
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}; "
            "Llama requires it even where head_dim is given"
        )
    has_attention_bias = reader.boolean("attention_bias", False)
    return dense.read(
        reader,
        DEFAULTS,
        attention={"qkv_bias": has_attention_bias, "output_bias": has_attention_bias},
        mlp_bias=reader.boolean("mlp_bias", False),
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    return {
        **dense.write(architecture),
        "attention_bias": dense.grouped_attention_of(architecture).output_bias,
        "mlp_bias": dense.mlp_of(architecture).bias,
    }


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=dense.decoder_rules,
        tiny={**dense.TINY, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6},
    ),
)
