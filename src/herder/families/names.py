"""What decoders have in common as names of weights: which tensors exist is read off the record.

Owns the names of the Llama shape and of experts; what is called otherwise stays in a family's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, MoeConfig
from herder.families.layer_types import layers_with
from herder.families.weights import EMBEDDING, HEAD, WeightRule, WeightRules

_RULES = (
    WeightRule("model.embed_tokens.weight", EMBEDDING),
    WeightRule("model.norm.weight", "norm.weight"),
    WeightRule("lm_head.weight", HEAD),
)
IGNORABLE_TENSORS = (
    "model.layers.{layer}.self_attn.rotary_emb.inv_freq",
    "model.layers.{layer}.self_attn.rotary_emb.cos_cached",
    "model.layers.{layer}.self_attn.rotary_emb.sin_cached",
    "model.layers.{layer}.self_attn.masked_bias",
    "model.rotary_emb.inv_freq",
)
"""Tables that old versions saved and that are computed from the config."""
_QKV = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
_MLP = ("gate", "up", "down")
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
_BRANCH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}
"""A layer's norms by hub name. Llama's name of the feed-forward's is here that of attention's
output."""

Linear = tuple[str, str, bool]
"""A module of a layer: its name in the hub, ours, and whether it has a bias."""


def decoder_rules(
    architecture: ArchitectureConfig,
    *own: WeightRule,
    block: str = "mlp",
    router: str = "gate",
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    fused: tuple[slice, slice] | None = None,
    ignorable: tuple[str, ...] = IGNORABLE_TENSORS,
) -> WeightRules:
    """Weight names of a decoder.

    own: what is peculiar to the family; such a rule takes the place of the usual one of its tensor.
    Of latent attention there are no usual ones. block: the hub's feed-forward, in which are router,
    the shared expert and experts: each with its projections, or `fused` in tensors of all of them,
    inputs before outputs, of which gate and up have these outputs.
    """
    norms = _BRANCH_NORMS if architecture.branch_norm else _NORMS
    usual = _RULES + in_layers((hub, ours, False) for hub, ours in norms.items())
    if isinstance(architecture.attention, GroupedQueryAttention):
        usual += _attention_rules(architecture.attention)
    if architecture.mlp is not None:
        linears = _gated(block, "feed_forward", bias=architecture.mlp.bias)
        usual += in_layers(linears, layers=layers_with(architecture, "dense"))
    if (moe := architecture.moe) is not None:
        layers = layers_with(architecture, "routed")
        usual += _router_rules(moe, f"{block}.{router}", f"{block}.{shared}", layers)
        if fused is None:
            experts, bias = f"{block}.experts.{{expert}}", moe.expert_bias
            pairs = zip(projections, _MLP, strict=True)
            linears = [(f"{experts}.{hub}", f"feed_forward.experts.{o}", bias) for hub, o in pairs]
            usual += in_layers(linears, layers=layers)
        else:
            usual += _fused_rules(moe, f"{block}.experts", fused, layers)
    replaced = {rule.ours for rule in own}
    return WeightRules(
        rules=(*(rule for rule in usual if rule.ours not in replaced), *own),
        num_layers=architecture.num_layers,
        tied=architecture.tie_embeddings,
        num_experts=0 if moe is None else moe.num_experts,
        ignorable=ignorable,
    )


def in_layers(
    linears: Iterable[Linear], *, layers: tuple[int, ...] | None = None
) -> tuple[WeightRule, ...]:
    """The weights and biases of modules that these layers have."""
    return tuple(
        WeightRule(
            f"model.layers.{{layer}}.{hub}.{kind}", f"layers.{{layer}}.{ours}.{kind}", layers
        )
        for hub, ours, has_bias in linears
        for kind in (("weight", "bias") if has_bias else ("weight",))
    )


def _gated(hub: str, ours: str, *, bias: bool = False) -> list[Linear]:
    """gate, up and down of one feed-forward."""
    return [(f"{hub}.{each}_proj", f"{ours}.{each}", bias) for each in _MLP]


def _attention_rules(attention: GroupedQueryAttention) -> tuple[WeightRule, ...]:
    linears = [(f"self_attn.{hub}", f"attention.{ours}", attention.qkv_bias) for hub, ours in _QKV]
    linears.append(("self_attn.o_proj", "attention.output", attention.output_bias))
    if attention.qk_norm in ("head", "projection"):
        linears.append(("self_attn.q_norm", "attention.query_norm", False))
        linears.append(("self_attn.k_norm", "attention.key_norm", False))
    sinks = ("model.layers.{layer}.self_attn.sinks", "layers.{layer}.attention.sinks.weight")
    return in_layers(linears) + ((WeightRule(*sinks),) if attention.sinks else ())


def _router_rules(
    moe: MoeConfig, router: str, shared: str, layers: tuple[int, ...]
) -> tuple[WeightRule, ...]:
    """Router, and the shared expert with its gate where there are any."""
    linears = [(router, "feed_forward.router", moe.router_bias)]
    if moe.shared_expert_intermediate_size is not None:
        linears += _gated(shared, "feed_forward.shared")
        if moe.shared_expert_gate:
            linears.append((f"{shared}_gate", "feed_forward.shared_gate", False))
    rules = in_layers(linears, layers=layers)
    if moe.correction_bias:
        hub, ours = f"{router}.e_score_correction_bias", "feed_forward.router.correction_bias"
        rules += (WeightRule(f"model.layers.{{layer}}.{hub}", f"layers.{{layer}}.{ours}", layers),)
    return rules


def _fused_rules(
    moe: MoeConfig, block: str, fused: tuple[slice, slice], layers: tuple[int, ...]
) -> tuple[WeightRule, ...]:
    parts = (
        ("gate_up_proj", "gate", fused[0]),
        ("gate_up_proj", "up", fused[1]),
        ("down_proj", "down", None),
    )
    kinds = (("", "weight"), ("_bias", "bias"))[: 1 + moe.expert_bias]
    return tuple(
        WeightRule(
            f"model.layers.{{layer}}.{block}.{hub}{suffix}",
            f"layers.{{layer}}.feed_forward.experts.{ours}.{kind}",
            layers,
            outputs=outputs,
            transposed=kind == "weight",
        )
        for hub, ours, outputs in parts
        for suffix, kind in kinds
    )
