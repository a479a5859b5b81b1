"""A mixture of experts written by hand: the parts of published families, combined freely.

Its config.json says `model_type: herder`. transformers has no class for it: a model that it must
load is written under a published model_type instead. Which layers are dense is a pattern.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families import keys, layer_types, names
from herder.families.family import Family
from herder.families.reading import ConfigReader

HF_CLASS = keys.HfClass(
    max_position_embeddings=4096,
    norm_topk_prob=True,
    router_aux_loss_coef=0.0,
    expert_width="moe_intermediate_size",
)
_DENSE = "dense_layers"
_QK_NORM, _SCORING, _BIAS = "qk_norm", "router_scoring", "router_correction_bias"
_SHARED, _SHARED_GATE = "shared_expert_intermediate_size", "shared_expert_gate"
_SCALING = "routed_scaling_factor"


def read(reader: ConfigReader) -> ArchitectureConfig:
    """The architecture of a hand-written config; keys left out are plain Mixtral."""
    num_layers = reader.integer("num_hidden_layers")
    without = _read_dense_layers(reader, num_layers)
    scorings = {"softmax": "softmax", "sigmoid": "sigmoid"}
    qk_norm = reader.choice(_QK_NORM, {"none": "none", "head": "head"}, "none")
    return keys.read(
        reader,
        HF_CLASS,
        routed={*range(num_layers)} - without,
        attention={"qk_norm": qk_norm},
        moe={
            "scoring": reader.choice(_SCORING, scorings, "softmax"),
            "correction_bias": reader.boolean(_BIAS, False),
            "routed_scaling_factor": reader.number(_SCALING, 1.0),
            "shared_expert_intermediate_size": reader.optional_integer(_SHARED),
            "shared_expert_gate": reader.boolean(_SHARED_GATE, False),
        },
    )


def to_hf(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Keys of a config.json; dense layers are written as their numbers."""
    moe = keys.experts_of(architecture)
    return {
        **keys.write(architecture, HF_CLASS),
        _DENSE: list(layer_types.layers_with(architecture, "dense")),
        _QK_NORM: keys.attention_of(architecture).qk_norm,
        _SCORING: moe.scoring,
        _BIAS: moe.correction_bias,
        _SCALING: moe.routed_scaling_factor,
        _SHARED: moe.shared_expert_intermediate_size,
        _SHARED_GATE: moe.shared_expert_gate,
    }


def _read_dense_layers(reader: ConfigReader, num_layers: int) -> set[int]:
    """The layers without experts: null, "first N", "last N" or a list of layers from 0 on."""
    value = reader.value(_DENSE)
    if value is None:
        return set()
    told = f"{_DENSE}={value!r}"
    if isinstance(value, list) and all(type(each) is int for each in value):
        if not all(0 <= each < num_layers for each in value):
            reader.problem(f"{told}: layers are 0 to {num_layers - 1}")
        return set(value)
    pattern = re.fullmatch(r"(first|last) (\d+)", value) if isinstance(value, str) else None
    if pattern is None:
        reader.problem(f'{told}: it must be "first N", "last N" or a list such as [0, 5]')
        return set()
    count = int(pattern[2])
    if count > num_layers:
        reader.problem(f"{told}: there are {num_layers} layers")
    return {*range(count)} if pattern[1] == "first" else {*range(num_layers - count, num_layers)}


HANDWRITTEN = Family(
    name="herder",
    architectures=("HerderForCausalLM",),
    read=read,
    to_hf=to_hf,
    weight_rules=partial(names.decoder_rules, shared="shared_expert"),
    tiny={
        **keys.TINY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "dense_layers": "last 1",
    },
)
