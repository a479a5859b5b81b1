"""What dense decoders of the Llama shape have in common: their keys and their weight names.

Owns the shared part only; biases, windows and norms that set families apart stay in their files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from herder.config.architecture import (
    Activation,
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    NormConfig,
)
from herder.families.reading import ConfigReader
from herder.families.rope import read_rope, write_rope
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


@dataclass(frozen=True)
class ClassDefaults:
    """What an absent key means: the defaults of the family's own class in transformers 5.24."""

    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""


def read_dense(
    reader: ConfigReader,
    defaults: ClassDefaults,
    *,
    layers: tuple[LayerSpec, ...],
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["none", "head"] = "none",
) -> ArchitectureConfig:
    """The architecture of the shared keys and of what the family read before.

    Sizes that no published file leaves out must be there. Raises what `reader.finish` raises.
    """
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.optional_integer("num_key_value_heads", defaults.num_key_value_heads)
    head_dim = reader.optional_integer("head_dim", defaults.head_dim)
    if head_dim is None:
        if hidden_size % num_heads and not reader.problems:
            reader.problem(
                f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}, and "
                "there is no head_dim"
            )
        head_dim = max(hidden_size // num_heads, 1)
    longest = reader.integer("max_position_embeddings", defaults.max_position_embeddings)
    keys = {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "max_position_embeddings": longest,
        "norm": NormConfig(eps=reader.number("rms_norm_eps", defaults.rms_norm_eps)),
        "tie_embeddings": reader.boolean("tie_word_embeddings", False),
        "ropes": (read_rope(reader, head_dim=head_dim, max_position_embeddings=longest),),
        "initializer_range": reader.number("initializer_range", 0.02),
    }
    mlp = MlpConfig(
        intermediate_size=reader.integer("intermediate_size"),
        activation=reader.choice("hidden_act", _ACTIVATIONS, "silu"),
        bias=mlp_bias,
    )
    reader.finish()
    attention = GroupedQueryAttention(
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        scale=head_dim**-0.5,
    )
    return ArchitectureConfig(**keys, attention=attention, mlp=mlp, layers=layers)


def grouped_attention_of(architecture: ArchitectureConfig) -> GroupedQueryAttention:
    """The attention of a dense family's model."""
    attention = architecture.attention
    assert isinstance(attention, GroupedQueryAttention), "dense families have no latent attention"
    return attention


def mlp_of(architecture: ArchitectureConfig) -> MlpConfig:
    """The feed-forward of a dense family's model."""
    assert architecture.mlp is not None, "dense families have a feed-forward of their own"
    return architecture.mlp


def write_dense(architecture: ArchitectureConfig) -> dict[str, Any]:
    """The shared keys of a config.json."""
    attention, mlp = grouped_attention_of(architecture), mlp_of(architecture)
    return {
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": _HF_ACTIVATIONS.get(mlp.activation, mlp.activation),
        "max_position_embeddings": architecture.max_position_embeddings,
        "initializer_range": architecture.initializer_range,
        "rms_norm_eps": architecture.norm.eps,
        "tie_word_embeddings": architecture.tie_embeddings,
        **write_rope(architecture.ropes[0]),
    }


def dense_rules(architecture: ArchitectureConfig) -> WeightRules:
    """Weight names of a dense decoder: which biases and norms exist is read off the record."""
    attention, mlp = grouped_attention_of(architecture), mlp_of(architecture)
    linears = [
        *((f"self_attn.{hub}", f"attention.{ours}", attention.qkv_bias) for hub, ours in _QKV),
        ("self_attn.o_proj", "attention.output", attention.output_bias),
        *(
            (f"mlp.{each}_proj", f"feed_forward.{each}", mlp.bias)
            for each in ("gate", "up", "down")
        ),
        ("input_layernorm", "attention_norm", False),
        ("post_attention_layernorm", "feed_forward_norm", False),
    ]
    if attention.qk_norm == "head":
        linears += [
            ("self_attn.q_norm", "attention.query_norm", False),
            ("self_attn.k_norm", "attention.key_norm", False),
        ]
    in_layers = [
        WeightRule(f"model.layers.{{layer}}.{hub}.{kind}", f"layers.{{layer}}.{ours}.{kind}")
        for hub, ours, has_bias in linears
        for kind in (("weight", "bias") if has_bias else ("weight",))
    ]
    return WeightRules(
        rules=(*_RULES, *in_layers),
        num_layers=architecture.num_layers,
        tied=architecture.tie_embeddings,
        ignorable=IGNORABLE_TENSORS,
    )
