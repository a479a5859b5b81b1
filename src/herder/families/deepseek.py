"""DeepSeek-V2 and V3: latent attention, dense layers first, experts chosen within groups.

V2 chooses by softmax and never normalizes, whatever norm_topk_prob says. V3 chooses by sigmoid with
a bias for the choice only. The layer past the last one in V3's files predicts further tokens; it is
no part of this decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from herder.config.architecture import (
    ArchitectureConfig,
    LatentAttention,
    RopeConfig,
    YarnScaling,
)
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader
from herder.families.rope import yarn_mscale
from herder.families.weights import WeightRules

V2_CLASS = keys.HfClass(
    max_position_embeddings=2048,
    expert_width="moe_intermediate_size",
    expert_counts=("n_routed_experts", "num_experts", "num_local_experts"),
)
V3_CLASS = replace(V2_CLASS, max_position_embeddings=4096, norm_topk_prob=True)
"""Source: transformers 5.24, DeepseekV2Config and DeepseekV3Config."""

_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_HOW_IT_WAS_TRAINED = ("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp")


def read_v2(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a DeepseekV2ForCausalLM."""
    reader.ignore("norm_topk_prob")
    reader.neutral("scoring_func", "softmax")
    reader.neutral("mlp_bias", False)
    methods = {"greedy": False, "group_limited_greedy": True}
    groups: dict[str, Any] = {}
    if reader.choice("topk_method", methods, "greedy"):
        groups = _read_groups(reader)
    reader.ignore("n_group", "topk_group")
    moe = _read_moe(reader, scaling=1.0, scoring="softmax", normalize_weights=False, **groups)
    return _read(reader, V2_CLASS, moe, num_dense=0, interleaved=True)


def read_v3(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a DeepseekV3ForCausalLM."""
    reader.ignore("num_nextn_predict_layers", "num_mtp_layers")
    reader.neutral("scoring_func", "sigmoid")
    reader.neutral("topk_method", "noaux_tc")
    moe = _read_moe(
        reader,
        scaling=2.5,
        scoring="sigmoid",
        correction_bias=True,
        group_score="top2_sum",
        **_read_groups(reader),
    )
    interleaved = reader.boolean("rope_interleave", True)
    return _read(reader, V3_CLASS, moe, num_dense=3, interleaved=interleaved)


def _read_groups(reader: ConfigReader) -> dict[str, int]:
    return {
        "num_groups": reader.integer("n_group"),
        "num_groups_per_token": reader.integer("topk_group"),
    }


def _read_moe(reader: ConfigReader, *, scaling: float, **fields: Any) -> dict[str, Any]:
    num_shared = reader.integer("n_shared_experts")
    return {
        "shared_expert_intermediate_size": num_shared * reader.integer("moe_intermediate_size"),
        "routed_scaling_factor": reader.number("routed_scaling_factor", scaling),
        **fields,
    }


def _read(
    reader: ConfigReader,
    defaults: keys.HfClass,
    moe: Mapping[str, Any],
    *,
    num_dense: int,
    interleaved: bool,
) -> ArchitectureConfig:
    """What both share; num_dense: how many first layers are, where the config does not say."""
    reader.ignore("head_dim", "qk_head_dim", *_HOW_IT_WAS_TRAINED)
    reader.neutral("moe_layer_freq", 1)
    num_heads = reader.integer("num_attention_heads")
    reader.neutral("num_key_value_heads", num_heads, None)
    num_layers = reader.integer("num_hidden_layers")
    first = reader.integer("first_k_dense_replace", num_dense, minimum=0)
    widths = {key: reader.integer(key) for key in _WIDTHS}
    rotary, whole = widths["qk_rope_head_dim"], sum(widths[key] for key in _WIDTHS[1:3])
    shared = keys.read_shared(
        reader,
        defaults,
        routed=range(first, num_layers),
        rope={"head_dim": rotary, "interleaved": interleaved},
        moe=moe,
    )
    attention = {
        "kind": "latent",
        "num_attention_heads": num_heads,
        # Absent it would be 1,536 there; published files always have it, null in V2-Lite.
        "q_lora_rank": reader.optional_integer("q_lora_rank", 1536),
        **widths,
        "bias": reader.boolean("attention_bias", False),
        "scale": whole**-0.5 * _mscale(reader, shared["ropes"][0]) ** 2,
    }
    reader.finish()
    return ArchitectureConfig.model_validate({**shared, "attention": attention})


def _mscale(reader: ConfigReader, rope: RopeConfig) -> float:
    """What YaRN multiplies the scale of attention by, twice: 1 without mscale_all_dim."""
    section = reader.optional_section("rope_parameters") or reader.optional_section("rope_scaling")
    weight = None if section is None else section.optional_number("mscale_all_dim")
    factor = getattr(rope.scaling, "factor", 1.0)
    return 1.0 if weight is None else yarn_mscale(factor, weight)


def v2_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    moe = keys.experts_of(architecture)
    method = "group_limited_greedy" if moe.num_groups > 1 else "greedy"
    return {**_to_hf(architecture, V2_CLASS), "topk_method": method}


def v3_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    return {
        **_to_hf(architecture, V3_CLASS),
        "rope_interleave": architecture.ropes[0].interleaved,
        "num_nextn_predict_layers": 0,
    }


def _to_hf(architecture: ArchitectureConfig, hf_class: keys.HfClass) -> dict[str, Any]:
    attention, moe = _latent_attention_of(architecture), keys.experts_of(architecture)
    shared_width = moe.shared_expert_intermediate_size or 0
    written = keys.write(architecture, hf_class)
    scaling = architecture.ropes[0].scaling
    if isinstance(scaling, YarnScaling):
        written["rope_scaling"] |= _mscale_all_dim(attention, scaling.factor)
    return {
        **written,
        **{key: getattr(attention, key) for key in _WIDTHS},
        "q_lora_rank": attention.q_lora_rank,
        "num_key_value_heads": attention.num_attention_heads,
        "attention_bias": attention.bias,
        "first_k_dense_replace": len(layer_types.layers_with(architecture, "dense")),
        "n_shared_experts": shared_width // moe.expert_intermediate_size,
        "n_group": moe.num_groups,
        "topk_group": moe.num_groups_per_token,
        "routed_scaling_factor": moe.routed_scaling_factor,
    }


def _mscale_all_dim(attention: LatentAttention, factor: float) -> dict[str, float]:
    """The weight whose mscale, squared, makes the scale what it is; published ones are short."""
    whole = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    squared = attention.scale * whole**0.5
    per_weight = yarn_mscale(factor, 1.0) - 1
    if squared <= 1 or per_weight == 0:
        return {}
    return {"mscale_all_dim": round((squared**0.5 - 1) / per_weight, 9)}


def _latent_attention_of(architecture: ArchitectureConfig) -> LatentAttention:
    assert isinstance(architecture.attention, LatentAttention), "DeepSeek's attention is latent"
    return architecture.attention


def weight_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names."""
    attention = _latent_attention_of(architecture)
    queries = [("self_attn.q_proj", "attention.query", False)]
    if attention.q_lora_rank is not None:
        queries = [
            ("self_attn.q_a_proj", "attention.query_down", attention.bias),
            ("self_attn.q_a_layernorm", "attention.query_latent_norm", False),
            ("self_attn.q_b_proj", "attention.query_up", False),
        ]
    linears = [
        *queries,
        ("self_attn.kv_a_proj_with_mqa", "attention.key_value_down", attention.bias),
        ("self_attn.kv_a_layernorm", "attention.key_value_latent_norm", False),
        ("self_attn.kv_b_proj", "attention.key_value_up", False),
        ("self_attn.o_proj", "attention.output", attention.bias),
    ]
    further = f"model.layers.{architecture.num_layers}.{{rest}}"
    return names.decoder_rules(
        architecture,
        *names.in_layers(linears),
        ignorable=(*names.IGNORABLE_TENSORS, further),
    )


_TINY = {
    **keys.TINY,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "hidden_size": 40,
    "intermediate_size": 72,
    "moe_intermediate_size": 28,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_theta": 100.0,
}

FAMILIES = (
    Family(
        name="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        read=read_v2,
        to_hf=v2_to_hf,
        weight_rules=weight_rules,
        tiny={**_TINY, "q_lora_rank": None, "topk_method": "greedy"},
    ),
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        read=read_v3,
        to_hf=v3_to_hf,
        weight_rules=weight_rules,
        tiny={
            **_TINY,
            "q_lora_rank": 18,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 1.5,
                "beta_slow": 0.25,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 32,
            },
        },
    ),
)
