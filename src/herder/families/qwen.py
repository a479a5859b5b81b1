"""Qwen 2, 2.5 and 3, dense.

Qwen 2 has biases on q, k and v, never on o. Qwen 3 norms each head of q and k before rope, has
heads of 128 unless told otherwise, and biases only where attention_bias says so, then on o too. In
both, a window is active only with use_sliding_window, and only from layer max_window_layers on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herder.config.architecture import ArchitectureConfig, LayerSpec
from herder.families.dense import (
    TINY,
    ClassDefaults,
    dense_rules,
    grouped_attention_of,
    read_dense,
    write_dense,
)
from herder.families.family import Family
from herder.families.reading import ConfigReader

QWEN2_DEFAULTS = ClassDefaults(max_position_embeddings=32_768)
QWEN3_DEFAULTS = ClassDefaults(max_position_embeddings=32_768, head_dim=128)
WINDOW = 4096
FIRST_WINDOW_LAYER = 28
"""Source: transformers 5.24, Qwen2Config and Qwen3Config."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def qwen2_from_hf(config: Mapping[str, Any], where: str) -> ArchitectureConfig:
    """The architecture of a Qwen2ForCausalLM."""
    reader = ConfigReader(config, where=where)
    return read_dense(reader, QWEN2_DEFAULTS, layers=_read_layers(reader), qkv_bias=True)


def qwen3_from_hf(config: Mapping[str, Any], where: str) -> ArchitectureConfig:
    """The architecture of a Qwen3ForCausalLM."""
    reader = ConfigReader(config, where=where)
    has_bias = reader.boolean("attention_bias", False)
    return read_dense(
        reader,
        QWEN3_DEFAULTS,
        layers=_read_layers(reader),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm="head",
    )


def _read_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Full or sliding attention by layer: layer_types where given, else the window rule."""
    num_layers = reader.integer("num_hidden_layers")
    uses_window = reader.boolean("use_sliding_window", False)
    window = reader.optional_integer("sliding_window", WINDOW)
    first = reader.integer("max_window_layers", FIRST_WINDOW_LAYER, minimum=0)
    reader.neutral("use_mrope", False)
    types = reader.optional_texts("layer_types")
    if types is None:
        slides = uses_window and window is not None
        types = [_SLIDING if slides and index >= first else _FULL for index in range(num_layers)]
    if len(types) != num_layers:
        reader.problem(f"layer_types has {len(types)} entries, num_hidden_layers={num_layers}")
    unknown = sorted({kind for kind in types if kind not in (_FULL, _SLIDING)})
    if unknown:
        reader.problem(f"layer_types has {', '.join(unknown)}; known: {_FULL}, {_SLIDING}")
    if _SLIDING in types and (window is None or not uses_window):
        reader.problem(
            f"layer_types has {_SLIDING}, but use_sliding_window={str(uses_window).lower()} and "
            f"sliding_window={window}: there is no window to slide"
        )
    sliding = LayerSpec() if window is None else LayerSpec(attention="sliding", window=window)
    return tuple(sliding if kind == _SLIDING else LayerSpec() for kind in types)


def qwen2_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json: layer_types say it all, max_window_layers repeats them if it can."""
    slides = [layer.attention == "sliding" for layer in architecture.layers]
    windows = [layer.window for layer in architecture.layers if layer.window is not None]
    return {
        **write_dense(architecture),
        "use_sliding_window": any(slides),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": slides.index(True) if any(slides) else architecture.num_layers,
        "layer_types": [_SLIDING if slide else _FULL for slide in slides],
    }


def qwen3_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    attention_bias = grouped_attention_of(architecture).output_bias
    return {**qwen2_to_hf(architecture), "attention_bias": attention_bias}


FAMILIES = (
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        from_hf=qwen2_from_hf,
        to_hf=qwen2_to_hf,
        weight_rules=dense_rules,
        tiny={
            **TINY,
            "hidden_size": 56,
            "intermediate_size": 72,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        from_hf=qwen3_from_hf,
        to_hf=qwen3_to_hf,
        weight_rules=dense_rules,
        tiny={**TINY, "hidden_size": 48, "intermediate_size": 104, "head_dim": 16},
    ),
)
