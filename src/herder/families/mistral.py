"""Mistral 7B and Nemo: no biases, one sliding window for all layers, heads of any width.

An absent sliding_window means 4,096 keys (v0.1), null means none (v0.2 and later, Nemo).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herder.config.architecture import ArchitectureConfig, LayerSpec
from herder.families.dense import TINY, ClassDefaults, dense_rules, read_dense, write_dense
from herder.families.family import Family
from herder.families.reading import ConfigReader

DEFAULTS = ClassDefaults(max_position_embeddings=131_072, num_key_value_heads=8)
WINDOW = 4096
"""Source: transformers 5.24, MistralConfig."""


def from_hf(config: Mapping[str, Any], where: str) -> ArchitectureConfig:
    """The architecture of a MistralForCausalLM."""
    reader = ConfigReader(config, where=where)
    window = reader.optional_integer("sliding_window", WINDOW)
    reader.neutral("attention_bias", False)
    if "layer_types" in config:
        reader.ignore("layer_types")
        reader.problem(
            "layer_types makes this a Ministral (transformers reads it as one), "
            "and that family is not supported"
        )
    layer = LayerSpec() if window is None else LayerSpec(attention="sliding", window=window)
    return read_dense(reader, DEFAULTS, layers=(layer,) * reader.integer("num_hidden_layers"))


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; the window is always written, for its absence would mean 4,096."""
    return {**write_dense(architecture), "sliding_window": architecture.layers[0].window}


FAMILIES = (
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        from_hf=from_hf,
        to_hf=to_hf,
        weight_rules=dense_rules,
        tiny={
            **TINY,
            "hidden_size": 40,
            "intermediate_size": 88,
            "head_dim": 16,
            "sliding_window": 8,
        },
    ),
)
