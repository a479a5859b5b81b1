"""SmolLM3: a Llama in which every fourth layer does not rotate; only those may slide."""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader

HF_CLASS = keys.HfClass(
    max_position_embeddings=32_768,
    num_key_value_heads=4,
    rope_theta=2e6,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)
"""Source: transformers 5.24, SmolLM3Config."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a SmolLM3ForCausalLM."""
    reader.ignore("pretraining_tp", "max_window_layers")
    is_on = reader.boolean("use_sliding_window", False)
    window = reader.optional_integer("sliding_window")
    rotating = layer_types.read_rotating(reader, empty_is_absent=False)
    layers = layer_types.read_layers(
        reader, [not rotates for rotates in rotating], window=window if is_on else None
    )
    return keys.read(reader, HF_CLASS, layers=layer_types.with_rotation(layers, rotating))


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    window = layer_types.window_of(architecture.layers)
    return {
        **keys.write(architecture, HF_CLASS),
        "no_rope_layers": layer_types.no_rope_layers(architecture),
        "layer_types": layer_types.write(architecture),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


FAMILIES = (
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=names.decoder_rules,
        tiny={
            **keys.TINY,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 4,
            "pad_token_id": None,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
)
