"""gpt-oss: sinks, windows on every other layer, clamped experts whose gate and up take turns."""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig, YarnScaling
from herder.families import dense, layer_types, routed
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.rope import yarn_attention_factor
from herder.families.weights import WeightRule, WeightRules

DEFAULTS = dense.ClassDefaults(
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=1.5e5,
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
    default = [
        not is_second for is_second in layer_types.every(2, reader.integer("num_hidden_layers"))
    ]
    layers = layer_types.read_layers(
        reader, default, window=reader.optional_integer("sliding_window", WINDOW)
    )
    has_bias = reader.boolean("attention_bias", True)
    moe = routed.read_experts(
        reader,
        width_key="intermediate_size",
        aux_loss=0.001,
        scoring="softmax",
        normalize_weights=True,
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0),
    )
    return dense.read(
        reader,
        DEFAULTS,
        layers=layers,
        attention={"qkv_bias": has_bias, "output_bias": has_bias, "sinks": True},
        rope={"absent": SCALING},
        norm={"multiply_in_fp32": True},
        moe=moe,
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; the rope's scaling is always written, for its absence means YaRN."""
    keys, moe = dense.write(architecture), routed.experts_of(architecture)
    return {
        **keys,
        **routed.write_experts(
            architecture, count_key="num_local_experts", width_key="intermediate_size"
        ),
        "rope_scaling": keys["rope_scaling"] or {"rope_type": "default"},
        "hidden_act": "silu",
        "swiglu_alpha": moe.swiglu_alpha,
        "swiglu_limit": moe.swiglu_limit,
        "attention_bias": dense.grouped_attention_of(architecture).output_bias,
        "sliding_window": layer_types.window_of(architecture.layers) or WINDOW,
        "layer_types": layer_types.write(architecture),
    }


def weight_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names: experts are stacked, inputs before outputs, gate and up taking turns."""
    router = [("mlp.router", "feed_forward.router", True)]
    return dense.decoder_rules(
        architecture,
        WeightRule("model.layers.{layer}.self_attn.sinks", "layers.{layer}.attention.sinks.weight"),
        *dense.in_layers(router, layers=dense.layers_with(architecture, "routed")),
        *routed.stacked_rules(
            architecture, "mlp.experts", gate=slice(0, None, 2), up=slice(1, None, 2)
        ),
    )


FAMILIES = (
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=weight_rules,
        tiny={
            **dense.TINY,
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
