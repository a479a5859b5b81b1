"""Mistral 7B and Nemo, Ministral and Mixtral: no biases, heads of any width, sliding windows.

An absent sliding_window means 4,096 keys in Mistral and Ministral (v0.1), null means none (v0.2 and
later, Nemo); in Mixtral absence means none. With layer_types a Mistral is a Ministral. Ministral 3
has no window, and raises the temperature of queries past the original one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader

MISTRAL_CLASS = keys.HfClass(max_position_embeddings=131_072, num_key_value_heads=8)
MINISTRAL3_CLASS = keys.HfClass(
    max_position_embeddings=262_144, rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128
)
MIXTRAL_CLASS = keys.HfClass(
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    num_key_value_heads=8,
    rope_theta=1e6,
    router_aux_loss_coef=0.001,
    expert_width="intermediate_size",
    expert_counts=("num_local_experts", "num_experts"),
)
WINDOW = 4096
"""Source: transformers 5.24, MistralConfig, MinistralConfig, Ministral3Config, MixtralConfig."""

_BETA = "llama_4_scaling_beta"


def read_mistral(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a MistralForCausalLM or MinistralForCausalLM."""
    reader.neutral("attention_bias", False)
    window = reader.optional_integer("sliding_window", WINDOW)
    default = [True] * reader.integer("num_hidden_layers")
    layers = layer_types.read_layers(reader, default, window=window)
    return keys.read(reader, MISTRAL_CLASS, layers=layers)


def mistral_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; the window is always written, for its absence would mean 4,096."""
    mixed = (
        {"layer_types": layer_types.write(architecture)} if len({*architecture.layers}) > 1 else {}
    )
    window = layer_types.window_of(architecture.layers)
    return {**keys.write(architecture, MISTRAL_CLASS), "sliding_window": window, **mixed}


def ministral_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; transformers needs a window there, though no layer may slide."""
    window = layer_types.window_of(architecture.layers) or WINDOW
    types = layer_types.write(architecture)
    written = keys.write(architecture, MISTRAL_CLASS)
    return {**written, "sliding_window": window, "layer_types": types}


def read_ministral3(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Ministral3ForCausalLM."""
    layers = layer_types.equal_layers(reader, reader.optional_integer("sliding_window"))
    section = reader.optional_section("rope_parameters") or reader.optional_section("rope_scaling")
    if section is None:
        reader.problem("rope_parameters is missing: it holds the scaling and llama_4_scaling_beta")
        section = reader
    section.ignore("max_position_embeddings")
    temperature = {
        "scale": section.number(_BETA),
        "floor_tokens": section.integer("original_max_position_embeddings"),
        "position_offset": 0,
    }
    hot = tuple(layer.model_copy(update={"temperature": True}) for layer in layers)
    attention = {"temperature": temperature}
    return keys.read(reader, MINISTRAL3_CLASS, layers=hot, attention=attention)


def ministral3_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; scaling and temperature share a section."""
    written = keys.write(architecture, MINISTRAL3_CLASS)
    temperature = keys.attention_of(architecture).temperature
    assert temperature is not None, "Ministral 3 has a query temperature"
    section = {"rope_type": "default", **(written.pop("rope_scaling") or {})}
    section |= {
        "rope_theta": written.pop("rope_theta"),
        "original_max_position_embeddings": temperature.floor_tokens,
        _BETA: temperature.scale,
    }
    return {
        **written,
        "rope_parameters": section,
        "sliding_window": layer_types.window_of(architecture.layers),
    }


def read_mixtral(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a MixtralForCausalLM."""
    # Noise on the inputs of the router in transformers' training.
    reader.ignore("router_jitter_noise")
    layers = layer_types.equal_layers(reader, reader.optional_integer("sliding_window"))
    moe = {"scoring": "softmax", "normalize_weights": True}
    return keys.read(reader, MIXTRAL_CLASS, layers=layers, moe=moe)


def mixtral_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    return {
        **keys.write(architecture, MIXTRAL_CLASS),
        "sliding_window": layer_types.window_of(architecture.layers),
    }


_TINY = {**keys.TINY, "hidden_size": 40, "intermediate_size": 88, "head_dim": 16}

FAMILIES = (
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        read=read_mistral,
        to_hf=mistral_to_hf,
        weight_rules=names.decoder_rules,
        tiny={**_TINY, "sliding_window": 8},
    ),
    Family(
        name="ministral",
        architectures=("MinistralForCausalLM",),
        read=read_mistral,
        to_hf=ministral_to_hf,
        weight_rules=names.decoder_rules,
        tiny={
            **_TINY,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family(
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        read=read_ministral3,
        to_hf=ministral3_to_hf,
        weight_rules=names.decoder_rules,
        tiny={
            **{key: value for key, value in _TINY.items() if key != "rope_theta"},
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 128,
                "beta_fast": 1.5,
                "beta_slow": 0.25,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                _BETA: 0.3,
            },
        },
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        read=read_mixtral,
        to_hf=mixtral_to_hf,
        weight_rules=partial(
            names.decoder_rules, block="block_sparse_moe", projections=("w1", "w3", "w2")
        ),
        tiny={**_TINY, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
)
