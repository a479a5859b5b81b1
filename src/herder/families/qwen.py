"""Qwen 2, 2.5 and 3, dense and with experts (Qwen1.5-MoE is a Qwen2-MoE).

Qwen 2 has biases on q, k and v, never on o. Qwen 3 norms each head of q and k before rope, has
heads of 128 unless told otherwise, and biases only where attention_bias says so, then on o too. A
window is active only with use_sliding_window: from layer max_window_layers on where layers are
dense, on even layers below it in Qwen2-MoE, on all layers in Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from herder.config.architecture import ArchitectureConfig, LayerSpec
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader

HF_CLASS = keys.HfClass(max_position_embeddings=32_768)
QWEN3_CLASS = replace(HF_CLASS, head_dim=128, attention_bias=False)
QWEN2_MOE_CLASS = replace(
    HF_CLASS,
    num_key_value_heads=16,
    norm_topk_prob=False,
    router_aux_loss_coef=0.001,
    expert_width="moe_intermediate_size",
)
QWEN3_MOE_CLASS = replace(QWEN2_MOE_CLASS, num_key_value_heads=4, attention_bias=False)
WINDOW = 4096
FIRST_WINDOW_LAYER = 28
"""Source: transformers 5.24, Qwen2Config, Qwen3Config, Qwen2MoeConfig and Qwen3MoeConfig."""

_SHARED_WIDTH = "shared_expert_intermediate_size"


def read_qwen2(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Qwen2ForCausalLM."""
    return keys.read(reader, HF_CLASS, layers=_read_layers(reader), attention={"qkv_bias": True})


def read_qwen3(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Qwen3ForCausalLM."""
    return keys.read(
        reader, QWEN3_CLASS, layers=_read_layers(reader), attention={"qk_norm": "head"}
    )


def read_qwen2_moe(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Qwen2MoeForCausalLM."""
    layers = _read_layers(reader, lambda index, limit: index % 2 == 0 and index < limit)
    width = reader.integer(_SHARED_WIDTH)
    shared = {"shared_expert_intermediate_size": width, "shared_expert_gate": True}
    return keys.read(
        reader,
        QWEN2_MOE_CLASS,
        layers=layers,
        routed=_read_routed(reader),
        attention={"qkv_bias": reader.boolean("qkv_bias", True)},
        moe={"scoring": "softmax", **shared},
    )


def read_qwen3_moe(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a Qwen3MoeForCausalLM; absent heads are hidden_size / heads wide."""
    reader.ignore("max_window_layers")
    layers = layer_types.equal_layers(reader, _read_window(reader))
    return keys.read(
        reader,
        QWEN3_MOE_CLASS,
        layers=layers,
        routed=_read_routed(reader),
        attention={"qk_norm": "head"},
        moe={"scoring": "softmax"},
    )


def _read_window(reader: ConfigReader) -> int | None:
    """The window that layers may have: none unless it is switched on; 0 is none too."""
    reader.neutral("use_mrope", False)
    is_on = reader.boolean("use_sliding_window", False)
    window = reader.optional_integer("sliding_window", WINDOW, minimum=0)
    return window if is_on and window != 0 else None


def _from_limit_on(index: int, limit: int) -> bool:
    return index >= limit


def _read_layers(
    reader: ConfigReader, slides: Callable[[int, int], bool] = _from_limit_on
) -> tuple[LayerSpec, ...]:
    """slides: whether a layer does, by its index and max_window_layers."""
    limit = reader.integer("max_window_layers", FIRST_WINDOW_LAYER, minimum=0)
    default = [slides(index, limit) for index in range(reader.integer("num_hidden_layers"))]
    return layer_types.read_layers(reader, default, window=_read_window(reader))


def _read_routed(reader: ConfigReader) -> set[int]:
    """Each decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.optional_integers("mlp_only_layers") or []
    return {*range(step - 1, reader.integer("num_hidden_layers"), step)} - {*dense}


def _to_hf(architecture: ArchitectureConfig, hf_class: keys.HfClass) -> dict[str, Any]:
    """Keys of a config.json: layer_types say it all, max_window_layers repeats them if it can."""
    window = layer_types.window_of(architecture.layers)
    slides = [layer.attention == "sliding" for layer in architecture.layers]
    return {
        **keys.write(architecture, hf_class),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": slides.index(True) if any(slides) else architecture.num_layers,
        "layer_types": layer_types.write(architecture),
    }


def qwen2_moe_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    return {
        **_moe_to_hf(architecture, QWEN2_MOE_CLASS),
        "qkv_bias": keys.attention_of(architecture).qkv_bias,
        _SHARED_WIDTH: keys.experts_of(architecture).shared_expert_intermediate_size,
    }


def qwen3_moe_to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json."""
    written = _moe_to_hf(architecture, QWEN3_MOE_CLASS)
    del written["layer_types"]
    return written


def _moe_to_hf(architecture: ArchitectureConfig, hf_class: keys.HfClass) -> dict[str, Any]:
    return {
        **_to_hf(architecture, hf_class),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(layer_types.layers_with(architecture, "dense")),
    }


_moe_rules = partial(names.decoder_rules, shared="shared_expert")
_TINY_MOE = {
    **keys.TINY,
    "num_hidden_layers": 3,
    "intermediate_size": 72,
    "moe_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

FAMILIES = (
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        read=read_qwen2,
        to_hf=partial(_to_hf, hf_class=HF_CLASS),
        weight_rules=names.decoder_rules,
        tiny={
            **keys.TINY,
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
        read=read_qwen3,
        to_hf=partial(_to_hf, hf_class=QWEN3_CLASS),
        weight_rules=names.decoder_rules,
        tiny={**keys.TINY, "hidden_size": 48, "intermediate_size": 104, "head_dim": 16},
    ),
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        read=read_qwen2_moe,
        to_hf=qwen2_moe_to_hf,
        weight_rules=_moe_rules,
        tiny={
            **_TINY_MOE,
            "hidden_size": 40,
            "shared_expert_intermediate_size": 44,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "mlp_only_layers": [1],
        },
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        read=read_qwen3_moe,
        to_hf=qwen3_moe_to_hf,
        weight_rules=_moe_rules,
        tiny={
            **_TINY_MOE,
            "hidden_size": 48,
            "head_dim": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
)
