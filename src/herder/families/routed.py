"""What families with routed experts have in common: their keys, and experts' weight names.

Owns the shared part only; scoring, groups and shared experts that set families apart stay in their
files. Four keys are of this project and of training alone: no published file has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from herder.config.architecture import ArchitectureConfig, MoeConfig
from herder.families import dense
from herder.families.reading import ConfigReader
from herder.families.weights import WeightRule, WeightRules

NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Two names of one number: transformers reads either, and renames it in some families on saving."""
WIDTH = "moe_intermediate_size"
AUX_LOSS = "router_aux_loss_coef"
_Z_LOSS, _NOISE, _UPDATE_RATE = "router_z_loss_coef", "router_noise", "router_bias_update_rate"
_GATED = ("gate_proj", "up_proj", "down_proj")


def read_experts(
    reader: ConfigReader,
    *,
    count_keys: Sequence[str] = NUM_EXPERTS,
    width_key: str = WIDTH,
    aux_loss: float | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Fields of a MoeConfig. aux_loss: what an absent coefficient means; None: there is no key.

    fields: what the family knows or read itself.
    """
    given = [key for key in count_keys if reader.has(key)]
    counts = [reader.integer(key) for key in given or count_keys[:1]]
    if len(set(counts)) > 1:
        reader.problem(f"{' and '.join(given)} are one number, but here they differ: {counts}")
    reader.ignore(*count_keys, "output_router_logits")
    read: dict[str, Any] = {
        "num_experts": counts[0],
        "num_experts_per_token": reader.integer("num_experts_per_tok"),
        "expert_intermediate_size": reader.integer(width_key),
        "activation": dense.read_activation(reader),
        "z_loss_coefficient": reader.number(_Z_LOSS, 0.0, may_be_zero=True),
    }
    if aux_loss is not None:
        coefficient = reader.number(AUX_LOSS, aux_loss, may_be_zero=True)
        read["aux_loss_coefficient"] = coefficient
    noise = reader.optional_section(_NOISE)
    if noise is not None:
        std, steps = noise.number("std"), noise.integer("decay_steps")
        read["noise"] = {"std": std, "decay_steps": steps}
    if fields.get("correction_bias"):
        rate = reader.number(_UPDATE_RATE, 0.0, may_be_zero=True)
        read["correction_bias_update_rate"] = rate
    return {**read, **fields}


def experts_of(architecture: ArchitectureConfig) -> MoeConfig:
    """The experts of a family that has them."""
    assert architecture.moe is not None, "this family has routed experts"
    return architecture.moe


def write_experts(
    architecture: ArchitectureConfig,
    *,
    count_key: str = NUM_EXPERTS[0],
    width_key: str = WIDTH,
    has_aux_loss: bool = True,
) -> dict[str, Any]:
    """The shared keys of a config.json; those of training only where they say something."""
    moe = experts_of(architecture)
    keys: dict[str, Any] = {
        count_key: moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        width_key: moe.expert_intermediate_size,
    }
    if has_aux_loss:
        keys[AUX_LOSS] = moe.aux_loss_coefficient
    noise = moe.noise and moe.noise.model_dump()
    training = {
        _Z_LOSS: moe.z_loss_coefficient,
        _NOISE: noise,
        _UPDATE_RATE: moe.correction_bias_update_rate,
    }
    return keys | {key: value for key, value in training.items() if value}


def decoder_rules(architecture: ArchitectureConfig, **names: Any) -> WeightRules:
    """Weight names of a decoder with experts; names: arguments of `expert_rules`."""
    return dense.decoder_rules(architecture, *expert_rules(architecture, **names))


def expert_rules(
    architecture: ArchitectureConfig,
    *,
    block: str = "mlp",
    projections: Sequence[str] = _GATED,
    shared: str = "shared_experts",
) -> tuple[WeightRule, ...]:
    """Router, experts (each with tensors of its own) and shared expert of the routed layers."""
    moe, routed = experts_of(architecture), dense.layers_with(architecture, "routed")
    linears = [
        (f"{block}.gate", "feed_forward.router", moe.router_bias),
        *(
            (f"{block}.experts.{{expert}}.{hub}", f"feed_forward.experts.{ours}", moe.expert_bias)
            for hub, ours in zip(projections, ("gate", "up", "down"), strict=True)
        ),
        *shared_linears(moe, f"{block}.{shared}"),
    ]
    rules = dense.in_layers(linears, layers=routed)
    if moe.correction_bias:
        hub, ours = f"{block}.gate.e_score_correction_bias", "feed_forward.router.correction_bias"
        rules += (WeightRule(f"model.layers.{{layer}}.{hub}", f"layers.{{layer}}.{ours}", routed),)
    return rules


def shared_linears(moe: MoeConfig, block: str) -> list[tuple[str, str, bool]]:
    """The shared expert and its gate, where there are any."""
    if moe.shared_expert_intermediate_size is None:
        return []
    gate = [(f"{block}_gate", "feed_forward.shared_gate", False)] if moe.shared_expert_gate else []
    return dense.gated(block, "feed_forward.shared") + gate


def stacked_rules(
    architecture: ArchitectureConfig, block: str, *, gate: slice, up: slice
) -> tuple[WeightRule, ...]:
    """Experts in tensors of all of them, inputs before outputs, gate and up in one.

    gate, up: which of the fused outputs are whose.
    """
    parts = (
        ("gate_up_proj", "gate", gate),
        ("gate_up_proj", "up", up),
        ("down_proj", "down", None),
    )
    kinds = (("", "weight"), ("_bias", "bias"))[: 1 + experts_of(architecture).expert_bias]
    routed = dense.layers_with(architecture, "routed")
    return tuple(
        WeightRule(
            f"model.layers.{{layer}}.{block}.{hub}{suffix}",
            f"layers.{{layer}}.feed_forward.experts.{ours}.{kind}",
            routed,
            outputs=outputs,
            transposed=kind == "weight",
        )
        for hub, ours, outputs in parts
        for suffix, kind in kinds
    )
