"""Llama 4, its text model: chunked attention, layers without rope, experts fed scaled inputs.

Every fourth layer does not rotate, sees everything, and raises the temperature of far queries. The
models with a vision encoder (Llama4ForConditionalGeneration) are another class.
"""

from __future__ import annotations

from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families.dense import (
    TINY,
    ClassDefaults,
    decoder_rules,
    grouped_attention_of,
    in_layers,
    layers_with,
    read_dense,
    write_dense,
)
from herder.families.family import Family
from herder.families.layer_types import (
    CHUNKED,
    layer_types,
    no_rope_layers,
    read_layers,
    read_rotating,
    window_of,
    with_rotation,
)
from herder.families.reading import ConfigReader
from herder.families.routed import (
    experts_of,
    read_experts,
    shared_linears,
    stacked_rules,
    write_experts,
)
from herder.families.weights import WeightRules

DEFAULTS = ClassDefaults(
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=5e5,
)
"""Source: transformers 5.24, Llama4TextConfig."""


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Llama4ForCausalLM."""
    reader.ignore("router_jitter_noise", "router_aux_loss_coef", "for_llm_compressor")
    rotating = read_rotating(reader, empty_is_absent=True)
    chunk = reader.optional_integer("attention_chunk_size", 8192)
    layers = with_rotation(read_layers(reader, rotating, window=chunk, kind=CHUNKED), rotating)
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
    routed = reader.optional_integers("moe_layers")
    if routed is None:
        routed = range(step - 1, len(layers), step)
    has_bias = reader.boolean("attention_bias", False)
    moe = read_experts(
        reader,
        width_key="intermediate_size",
        shared_expert_intermediate_size=reader.integer("intermediate_size"),
        scoring="sigmoid",
        normalize_weights=False,
        choose_by_logits=True,
        weight_on_input=True,
    )
    return read_dense(
        reader,
        DEFAULTS,
        layers=layers,
        routed=routed,
        attention={
            "qkv_bias": has_bias,
            "output_bias": has_bias,
            "qk_norm": "weightless" if reader.boolean("use_qk_norm", True) else "none",
            "temperature": temperature if tuning else None,
        },
        rope={"interleaved": True},
        moe=moe,
        mlp_key="intermediate_size_mlp",
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    attention, mlp = grouped_attention_of(architecture), architecture.mlp
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
        **write_dense(architecture),
        **write_experts(
            architecture,
            count_key="num_local_experts",
            width_key="intermediate_size",
            has_aux_loss=False,
        ),
        **({} if mlp is None else {"intermediate_size_mlp": mlp.intermediate_size}),
        "moe_layers": list(layers_with(architecture, "routed")),
        "attention_bias": attention.output_bias,
        "attention_chunk_size": window_of(architecture.layers),
        "layer_types": layer_types(architecture),
        "no_rope_layers": no_rope_layers(architecture),
        "use_qk_norm": attention.qk_norm == "weightless",
        "attn_temperature_tuning": temperature is not None,
        **tuning,
    }


def weight_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names: experts are stacked, inputs before outputs, gate before up."""
    moe, routed = experts_of(architecture), layers_with(architecture, "routed")
    width = moe.expert_intermediate_size
    linears = [
        ("feed_forward.router", "feed_forward.router", False),
        *shared_linears(moe, "feed_forward.shared_expert"),
    ]
    return decoder_rules(
        architecture,
        *in_layers(linears, layers=routed),
        *stacked_rules(
            architecture,
            "feed_forward.experts",
            gate=slice(0, width),
            up=slice(width, 2 * width),
        ),
        block="feed_forward",
    )


FAMILIES = (
    Family(
        name="llama4_text",
        architectures=("Llama4ForCausalLM",),
        read=read,
        to_hf=to_hf,
        weight_rules=weight_rules,
        tiny={
            **TINY,
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
