"""Gemma 2 and 3 (text): norms around both branches, weights kept around zero, scaled embeddings.

Gemma 2 caps the logits of attention and head, Gemma 3 norms each head of q and k instead and turns
its sliding layers by a table of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from herder.config.architecture import ArchitectureConfig, RopeConfig
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.rope import read_rope, write_rope

GEMMA2_CLASS = keys.HfClass(
    max_position_embeddings=8192,
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    attention_bias=False,
)
GEMMA3_CLASS = replace(GEMMA2_CLASS, max_position_embeddings=131_072, rope_theta=1e6)
LOCAL_THETA = 10_000.0
WINDOW, PATTERN = 4096, 6
QUERY_SCALAR = 256
ATTENTION_CAP, FINAL_CAP = 50.0, 30.0
"""Source: transformers 5.24, Gemma2Config and Gemma3TextConfig."""

_ATTENTION_CAP, _FINAL_CAP = "attn_logit_softcapping", "final_logit_softcapping"
_LOCAL_THETA, _SCALAR = "rope_local_base_freq", "query_pre_attn_scalar"


def read_gemma2(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Gemma2ForCausalLM."""
    reader.ignore("sliding_window_size")
    cap = reader.optional_number(_ATTENTION_CAP, ATTENTION_CAP)
    final = reader.optional_number(_FINAL_CAP, FINAL_CAP)
    return _read(
        reader, GEMMA2_CLASS, 2, attention={"logit_softcap": cap}, final_logit_softcap=final
    )


def read_gemma3(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Gemma3ForCausalLM; its attention has no cap, whatever the config."""
    reader.neutral(_ATTENTION_CAP, None)
    pattern = reader.integer("sliding_window_pattern", PATTERN)
    reader.ignore("_sliding_window_pattern")
    final = reader.optional_number(_FINAL_CAP)
    ropes = _read_ropes(reader)
    return _read(
        reader,
        GEMMA3_CLASS,
        pattern,
        attention={"qk_norm": "head"},
        ropes=ropes,
        final_logit_softcap=final,
    )


def _read(
    reader: ConfigReader,
    defaults: keys.HfClass,
    pattern: int,
    *,
    attention: Mapping[str, Any],
    ropes: tuple[RopeConfig, ...] | None = None,
    **fields: Any,
) -> ArchitectureConfig:
    """What both share; each pattern-th layer is full."""
    reader.ignore("hidden_act", "cache_implementation")
    reader.neutral("use_bidirectional_attention", False, None)
    default = layer_types.all_but(pattern, reader.integer("num_hidden_layers"))
    window = reader.optional_integer("sliding_window", WINDOW)
    layers = layer_types.read_layers(reader, default, window=window)
    if ropes is not None:
        tables = {"full": 0, "sliding": 1}
        layers = tuple(
            layer.model_copy(update={"rope": tables[layer.attention]}) for layer in layers
        )
    return keys.read(
        reader,
        defaults,
        layers=layers,
        attention={"scale": reader.integer(_SCALAR, QUERY_SCALAR) ** -0.5, **attention},
        ropes=ropes,
        norm={"weight_offset": 1, "multiply_in_fp32": True},
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        branch_norm=True,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        **fields,
    )


def _read_ropes(reader: ConfigReader) -> tuple[RopeConfig, ...]:
    """The tables of full and sliding layers: a section each, or keys of their own."""
    nested = reader.optional_section("rope_parameters")
    full, sliding = (
        nested and nested.optional_section(kind) for kind in (layer_types.FULL, layer_types.SLIDING)
    )
    scaling = reader.optional_section("rope_scaling")
    head_dim = keys.read_head_dim(reader, GEMMA3_CLASS)
    longest = reader.integer("max_position_embeddings", GEMMA3_CLASS.max_position_embeddings)
    tables = (
        (reader.number("rope_theta", GEMMA3_CLASS.rope_theta), (full, scaling)),
        (reader.number(_LOCAL_THETA, LOCAL_THETA), (sliding,)),
    )
    return tuple(
        read_rope(
            reader,
            head_dim=head_dim,
            max_position_embeddings=longest,
            theta=theta,
            sections=[section for section in sections if section is not None],
        )
        for theta, sections in tables
    )


def gemma2_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    attention, written = keys.attention_of(architecture), keys.write(architecture, GEMMA2_CLASS)
    return {
        **written,
        "hidden_activation": written["hidden_act"],
        _SCALAR: round(attention.scale**-2),
        _ATTENTION_CAP: attention.logit_softcap,
        _FINAL_CAP: architecture.final_logit_softcap,
        "sliding_window": layer_types.window_of(architecture.layers) or WINDOW,
        "layer_types": layer_types.write(architecture),
    }


def gemma3_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; a scaled table of sliding layers takes the newer spelling."""
    written = gemma2_to_hf(architecture)
    if len(architecture.ropes) != 2:
        return written
    tables = [write_rope(rope) for rope in architecture.ropes]
    if tables[1]["rope_scaling"] is None:
        return {**written, _LOCAL_THETA: architecture.ropes[1].theta}
    del written["rope_theta"], written["rope_scaling"]
    written["rope_parameters"] = {
        kind: {**(table["rope_scaling"] or {}), "rope_theta": table["rope_theta"]}
        for kind, table in zip((layer_types.FULL, layer_types.SLIDING), tables, strict=True)
    }
    return written


_TINY = {
    **{key: value for key, value in keys.TINY.items() if key != "num_hidden_layers"},
    "hidden_size": 48,
    "intermediate_size": 80,
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 10,
    "pad_token_id": None,
}

FAMILIES = (
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        read=read_gemma2,
        to_hf=gemma2_to_hf,
        weight_rules=names.decoder_rules,
        tiny={**_TINY, "num_hidden_layers": 2, _ATTENTION_CAP: 2.0, _FINAL_CAP: 3.0},
    ),
    Family(
        name="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        read=read_gemma3,
        to_hf=gemma3_to_hf,
        weight_rules=names.decoder_rules,
        tiny={
            **_TINY,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            _LOCAL_THETA: 100.0,
        },
    ),
)
