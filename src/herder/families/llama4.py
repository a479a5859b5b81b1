"""Llama 4, its text model: chunked attention, layers without rope, experts fed scaled inputs.

Every fourth layer does not rotate, sees everything, and raises the temperature of far queries. The
models with a vision encoder (Llama4ForConditionalGeneration) are another class.
"""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.weights import WeightRules

HF_CLASS = keys.HfClass(
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=5e5,
    attention_bias=False,
    mlp_width="intermediate_size_mlp",
    expert_width="intermediate_size",
    expert_counts=("num_local_experts", "num_experts"),
)
"""Source: transformers 5.24, Llama4TextConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Llama4ForCausalLM."""
    reader.ignore("router_jitter_noise", "router_aux_loss_coef", "for_llm_compressor")
    rotating = layer_types.read_rotating(reader, empty_is_absent=True)
    chunk = reader.optional_integer("attention_chunk_size", 8192)
    layers = layer_types.with_rotation(
        layer_types.read_layers(reader, rotating, window=chunk, kind=layer_types.CHUNKED), rotating
    )
    tuning = reader.truth("attn_temperature_tuning", True)
    temperature = {
        "scale": reader.number("attn_scale", 0.1),
        "floor_tokens": reader.integer("floor_scale", 8192),
        "position_offset": 1,
    }
    layers = tuple(
        layer.model_copy(update={"temperature": tuning and layer.rope is None}) for layer in layers
    )
    step = reader.integer("interleave_moe_layer_step", 1)
    with_experts = reader.optional_integers("moe_layers")
    if with_experts is None:
        with_experts = range(step - 1, len(layers), step)
    return keys.read(
        reader,
        HF_CLASS,
        layers=layers,
        routed=with_experts,
        attention={
            "qk_norm": "weightless" if reader.boolean("use_qk_norm", True) else "none",
            "temperature": temperature if tuning else None,
        },
        rope={"interleaved": True},
        moe={
            "shared_expert_intermediate_size": reader.integer("intermediate_size"),
            "scoring": "sigmoid",
            "normalize_weights": False,
            "choose_by_logits": True,
            "weight_on_input": True,
        },
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    attention = keys.attention_of(architecture)
    temperature = attention.temperature
    tuning = (
        {}
        if temperature is None
        else {
            "attn_scale": temperature.scale,
            "floor_scale": temperature.floor_tokens,
        }
    )
    return {
        **keys.write(architecture, HF_CLASS),
        "moe_layers": list(layer_types.layers_with(architecture, "routed")),
        "attention_chunk_size": layer_types.window_of(architecture.layers),
        "layer_types": layer_types.write(architecture),
        "no_rope_layers": layer_types.no_rope_layers(architecture),
        "use_qk_norm": attention.qk_norm == "weightless",
        "attn_temperature_tuning": temperature is not None,
        **tuning,
    }


def weight_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names: experts are stacked, inputs before outputs, gate before up."""
    width = keys.experts_of(architecture).expert_intermediate_size
    return names.decoder_rules(
        architecture,
        block="feed_forward",
        router="router",
        shared="shared_expert",
        fused=(slice(0, width), slice(width, 2 * width)),
    )


FAMILIES = (
    Family(
        name="llama4_text",
        architectures=("Llama4ForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=weight_rules,
        tiny={
            **keys.TINY,
            "hidden_size": 40,
            "intermediate_size": 28,
            "intermediate_size_mlp": 72,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "attn_scale": 0.4,
        },
    ),
)
