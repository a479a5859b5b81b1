"""gpt-oss: sinks, windows on every other layer, clamped experts whose gate and up take turns."""

from __future__ import annotations

from functools import partial
from typing import Any

from herder.config.architecture import ArchitectureConfig, YarnScaling
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.rope import yarn_attention_factor

HF_CLASS = keys.HfClass(
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=1.5e5,
    attention_bias=True,
    router_aux_loss_coef=0.001,
    expert_width="intermediate_size",
    expert_counts=("num_local_experts", "num_experts"),
)
WINDOW = 128
"""Source: transformers 5.24, GptOssConfig. It must be there, though no layer may slide."""
SCALING = YarnScaling(
    factor=32.0,
    original_max_position_embeddings=4096,
    truncate=False,
    attention_factor=yarn_attention_factor(32.0, None, None),
)
"""Without rope keys. Source: as above."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a GptOssForCausalLM."""
    # Its experts' nonlinearity is its own; the two others repeat what other keys say.
    reader.neutral("hidden_act", "silu")
    reader.ignore("experts_per_token", "initial_context_length")
    default = layer_types.all_but(2, reader.integer("num_hidden_layers"))
    layers = layer_types.read_layers(
        reader, default, window=reader.optional_integer("sliding_window", WINDOW)
    )
    return keys.read(
        reader,
        HF_CLASS,
        layers=layers,
        attention={"sinks": True},
        rope={"absent": SCALING},
        norm={"multiply_in_fp32": True},
        moe={
            "scoring": "softmax",
            "normalize_weights": True,
            "router_bias": True,
            "expert_bias": True,
            "activation": "clamped_swiglu",
            "swiglu_alpha": reader.number("swiglu_alpha", 1.702),
            "swiglu_limit": reader.number("swiglu_limit", 7.0),
        },
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; the rope's scaling is always written, for its absence means YaRN."""
    written, moe = keys.write(architecture, HF_CLASS), keys.experts_of(architecture)
    return {
        **written,
        "rope_scaling": written["rope_scaling"] or {"rope_type": "default"},
        "hidden_act": "silu",
        "swiglu_alpha": moe.swiglu_alpha,
        "swiglu_limit": moe.swiglu_limit,
        "sliding_window": layer_types.window_of(architecture.layers) or WINDOW,
        "layer_types": layer_types.write(architecture),
    }


FAMILIES = (
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=partial(
            names.decoder_rules, router="router", fused=(slice(0, None, 2), slice(1, None, 2))
        ),
        tiny={
            **keys.TINY,
            "hidden_size": 40,
            "intermediate_size": 28,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 1.0,
            "rope_theta": 100.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 1.5,
                "beta_slow": 0.25,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
)
