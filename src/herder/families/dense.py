"""What decoders of the Llama shape have in common: their keys and their weight names.

Owns the shared part only; biases, windows and norms that set families apart stay in their files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from herder.config.architecture import (
    Activation,
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    RopeConfig,
)
from herder.families.reading import ConfigReader
from herder.families.rope import THETA, read_rope, write_rope
from herder.families.weights import EMBEDDING, HEAD, WeightRule, WeightRules

_ACTIVATIONS: dict[str, Activation] = {
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_HF_ACTIVATIONS = {ours: hf for hf, ours in _ACTIVATIONS.items()}

TINY = {
    "vocab_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "initializer_range": 0.2,
}
"""What the tiny models of dense families share; each adds widths of its own."""

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


@dataclass(frozen=True)
class ClassDefaults:
    """What an absent key means: the defaults of the family's own class in transformers 5.24."""

    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rope_theta: float = THETA
    tie_word_embeddings: bool = False


def read(
    reader: ConfigReader,
    defaults: ClassDefaults,
    *,
    attention: Mapping[str, Any] | None = None,
    rope: Mapping[str, Any] | None = None,
    **others: Any,
) -> ArchitectureConfig:
    """The architecture of the shared keys and of what the family read before.

    Sizes that no published file leaves out must be there. attention: fields of its record that the
    family knows; rope: arguments of `read_rope`; others: those of `read_shared`. Raises what
    `reader.finish` raises.
    """
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.optional_integer("num_key_value_heads", defaults.num_key_value_heads)
    head_dim = read_head_dim(reader, defaults)
    shared = read_shared(reader, defaults, rope={"head_dim": head_dim, **(rope or {})}, **others)
    reader.finish()
    grouped = {
        "kind": "grouped_query",
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }
    return ArchitectureConfig.model_validate(
        {**shared, "attention": {**grouped, **(attention or {})}}
    )


def read_head_dim(reader: ConfigReader, defaults: ClassDefaults) -> int:
    """head_dim, or what its absence or null means."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.optional_integer("head_dim", defaults.head_dim)
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads and not reader.problems:
        reader.problem(
            f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}, and "
            "there is no head_dim"
        )
    return max(hidden_size // num_heads, 1)


def read_shared(
    reader: ConfigReader,
    defaults: ClassDefaults,
    *,
    rope: Mapping[str, Any],
    layers: Iterable[LayerSpec] | None = None,
    routed: Container[int] | None = None,
    ropes: tuple[RopeConfig, ...] | None = None,
    norm: Mapping[str, Any] | None = None,
    moe: Mapping[str, Any] | None = None,
    mlp_bias: bool = False,
    mlp_key: str = "intermediate_size",
    activation_key: str = "hidden_act",
    activation: str = "silu",
    **fields: Any,
) -> dict[str, Any]:
    """Fields of the architecture that all families have; to be made a record once all is read.

    rope: arguments of `read_rope`, unless the family read its `ropes` itself. layers: absent, all
    are alike. routed: of a family with experts, the layers that have them; absent, all. norm, moe:
    fields of those records. mlp_key: the width of dense layers, read where there are any. fields:
    the rest.
    """
    num_layers = reader.integer("num_hidden_layers")
    has_experts = [moe is not None and (routed is None or i in routed) for i in range(num_layers)]
    longest = reader.integer("max_position_embeddings", defaults.max_position_embeddings)
    given: dict[str, Any] = {
        "max_position_embeddings": longest,
        "theta": defaults.rope_theta,
        **rope,
    }
    ties = defaults.tie_word_embeddings
    shared: dict[str, Any] = {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "max_position_embeddings": longest,
        "norm": {"eps": reader.number("rms_norm_eps", defaults.rms_norm_eps), **(norm or {})},
        "tie_embeddings": reader.boolean("tie_word_embeddings", ties),
        "ropes": ropes or (read_rope(reader, **given),),
        "initializer_range": reader.number("initializer_range", 0.02),
        "layers": tuple(
            layer.model_copy(update={"feed_forward": "routed"}) if has else layer
            for layer, has in zip(layers or [LayerSpec()] * num_layers, has_experts, strict=False)
        ),
        "mlp": None,
        "moe": moe,
    }
    kind = read_activation(reader, activation_key, activation)
    if not all(has_experts):
        width = reader.integer(mlp_key)
        mlp = {"intermediate_size": width, "activation": kind, "bias": mlp_bias}
        shared["mlp"] = mlp
    reader.ignore(mlp_key)
    return {**shared, **fields}


def read_activation(
    reader: ConfigReader, key: str = "hidden_act", default: str = "silu"
) -> Activation:
    """The nonlinearity of the feed-forward."""
    return reader.choice(key, _ACTIVATIONS, default)


def grouped_attention_of(architecture: ArchitectureConfig) -> GroupedQueryAttention:
    """The attention of a family without latent attention."""
    attention = architecture.attention
    assert isinstance(attention, GroupedQueryAttention), "this family has no latent attention"
    return attention


def mlp_of(architecture: ArchitectureConfig) -> MlpConfig:
    """The feed-forward of a family that has no routed layers."""
    assert architecture.mlp is not None, "this family's layers are dense"
    return architecture.mlp


def layers_with(architecture: ArchitectureConfig, feed_forward: str) -> tuple[int, ...]:
    """Indices of the dense or of the routed layers."""
    kinds = [layer.feed_forward for layer in architecture.layers]
    return tuple(index for index, kind in enumerate(kinds) if kind == feed_forward)


def write_shared(architecture: ArchitectureConfig) -> dict[str, Any]:
    """The keys that every family has."""
    feed_forward = architecture.mlp or architecture.moe
    assert feed_forward is not None, "every architecture has feed-forwards"
    widths = (
        {}
        if architecture.mlp is None
        else {"intermediate_size": architecture.mlp.intermediate_size}
    )
    return {
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        **widths,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.attention.num_attention_heads,
        "hidden_act": _HF_ACTIVATIONS.get(feed_forward.activation, feed_forward.activation),
        "max_position_embeddings": architecture.max_position_embeddings,
        "initializer_range": architecture.initializer_range,
        "rms_norm_eps": architecture.norm.eps,
        "tie_word_embeddings": architecture.tie_embeddings,
        **write_rope(architecture.ropes[0]),
    }


def write(architecture: ArchitectureConfig) -> dict[str, Any]:
    """The shared keys of a config.json with grouped attention."""
    attention = grouped_attention_of(architecture)
    return {
        **write_shared(architecture),
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
    }


Linear = tuple[str, str, bool]
"""A module of a layer: its name in the hub, ours, and whether it has a bias."""


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


def gated(hub: str, ours: str, *, bias: bool = False) -> list[Linear]:
    """gate, up and down of one feed-forward."""
    return [(f"{hub}.{each}_proj", f"{ours}.{each}", bias) for each in _MLP]


def _attention_rules(attention: GroupedQueryAttention) -> tuple[WeightRule, ...]:
    linears = [(f"self_attn.{hub}", f"attention.{ours}", attention.qkv_bias) for hub, ours in _QKV]
    linears.append(("self_attn.o_proj", "attention.output", attention.output_bias))
    if attention.qk_norm in ("head", "projection"):
        linears.append(("self_attn.q_norm", "attention.query_norm", False))
        linears.append(("self_attn.k_norm", "attention.key_norm", False))
    return in_layers(linears)


def decoder_rules(
    architecture: ArchitectureConfig,
    *own: WeightRule,
    block: str = "mlp",
    ignorable: tuple[str, ...] = IGNORABLE_TENSORS,
) -> WeightRules:
    """Weight names of a decoder: which tensors it has is read off the record.

    own: what is peculiar to the family; such a rule takes the place of the usual one of its tensor.
    Of latent attention and of experts there are no usual ones. block: the hub's feed-forward.
    """
    norms = _BRANCH_NORMS if architecture.branch_norm else _NORMS
    usual = _RULES + in_layers((hub, ours, False) for hub, ours in norms.items())
    if isinstance(architecture.attention, GroupedQueryAttention):
        usual += _attention_rules(architecture.attention)
    if architecture.mlp is not None:
        linears = gated(block, "feed_forward", bias=architecture.mlp.bias)
        usual += in_layers(linears, layers=layers_with(architecture, "dense"))
    replaced = {rule.ours for rule in own}
    return WeightRules(
        rules=(*(rule for rule in usual if rule.ours not in replaced), *own),
        num_layers=architecture.num_layers,
        tied=architecture.tie_embeddings,
        num_experts=0 if architecture.moe is None else architecture.moe.num_experts,
        ignorable=ignorable,
    )
