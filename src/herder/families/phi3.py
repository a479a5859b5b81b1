"""Phi-3 and Phi-4-mini: q, k and v in one matrix, gate and up in another, heads rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.weights import WeightRule, WeightRules

HF_CLASS = keys.HfClass(max_position_embeddings=4096, rms_norm_eps=1e-5)
ORIGINAL_WINDOW = 4096
"""Source: transformers 5.24, Phi3Config."""

_SHARE, _ORIGINAL = "partial_rotary_factor", "original_max_position_embeddings"


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Phi3ForCausalLM."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.neutral(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.neutral(key, 1)
    return keys.read(
        reader,
        HF_CLASS,
        layers=layer_types.equal_layers(reader, reader.optional_integer("sliding_window")),
        rope={"original": ORIGINAL_WINDOW, "rotates_part": True},
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; the original window stands outside, where transformers looks first."""
    rope = architecture.ropes[0]
    window = getattr(rope.scaling, _ORIGINAL, ORIGINAL_WINDOW)
    return {
        **keys.write(architecture, HF_CLASS),
        _SHARE: rope.rotary_dim / keys.attention_of(architecture).head_dim,
        _ORIGINAL: window,
        "sliding_window": layer_types.window_of(architecture.layers),
    }


def weight_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names: the outputs of fused matrices follow each other."""
    attention, mlp = keys.attention_of(architecture), architecture.mlp
    assert mlp is not None, "its layers are dense"
    width = mlp.intermediate_size
    heads = (attention.num_attention_heads, *[attention.num_key_value_heads] * 2)
    return names.decoder_rules(
        architecture,
        *_fused(
            "self_attn.qkv_proj",
            {
                f"attention.{name}": count * attention.head_dim
                for name, count in zip(("query", "key", "value"), heads, strict=True)
            },
        ),
        *_fused("mlp.gate_up_proj", {"feed_forward.gate": width, "feed_forward.up": width}),
    )


def _fused(hub: str, outputs: Mapping[str, int]) -> list[WeightRule]:
    """Several of our matrices, by how many outputs each has, in one hub tensor."""
    bounds = pairwise(accumulate(outputs.values(), initial=0))
    return [
        WeightRule(
            f"model.layers.{{layer}}.{hub}.weight",
            f"layers.{{layer}}.{ours}.weight",
            outputs=slice(start, end),
        )
        for ours, (start, end) in zip(outputs, bounds, strict=True)
    ]


FAMILIES = (
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=weight_rules,
        tiny={
            **keys.TINY,
            "hidden_size": 64,
            "intermediate_size": 88,
            "pad_token_id": None,
            _SHARE: 0.5,
        },
    ),
)
