"""What dense decoders of the Llama shape have in common: their keys and their weight names.

Owns the shared part only; biases, windows and norms that set families apart stay in their files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from herder.config.architecture import (
    Activation,
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    NormConfig,
    RopeConfig,
)
from herder.families.reading import ConfigReader
from herder.families.rope import read_rope, write_rope
from herder.families.weights import EMBEDDING, HEAD, WeightRule, WeightRules

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_HF_ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
}

RULES = (
    WeightRule("model.embed_tokens.weight", EMBEDDING),
    WeightRule(
        "model.layers.{layer}.input_layernorm.weight", "layers.{layer}.attention_norm.weight"
    ),
    WeightRule(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.{layer}.feed_forward_norm.weight",
    ),
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
_ATTENTION = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("o_proj", "output"))
_MLP = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))


@dataclass(frozen=True)
class ClassDefaults:
    """What an absent key means: the defaults of the family's own class in transformers 5.24."""

    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""


@dataclass(frozen=True)
class DenseKeys:
    """The shared keys, read. Sizes are per model, head_dim per head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: Activation
    max_position_embeddings: int
    initializer_range: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig

    def architecture(
        self,
        layers: tuple[LayerSpec, ...],
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        norms_heads: bool = False,
    ) -> ArchitectureConfig:
        """The record, with what the family adds."""
        return ArchitectureConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            norm=NormConfig(eps=self.rms_norm_eps),
            tie_embeddings=self.tie_word_embeddings,
            attention=GroupedQueryAttention(
                num_attention_heads=self.num_attention_heads,
                num_key_value_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm="head" if norms_heads else "none",
                scale=self.head_dim**-0.5,
            ),
            ropes=(self.rope,),
            mlp=MlpConfig(
                intermediate_size=self.intermediate_size,
                activation=self.activation,
                bias=mlp_bias,
            ),
            layers=layers,
            initializer_range=self.initializer_range,
        )


def read_dense(reader: ConfigReader, defaults: ClassDefaults) -> DenseKeys:
    """Takes the shared keys. Sizes that no published file leaves out must be there."""
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
    return DenseKeys(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        activation=reader.choice("hidden_act", _ACTIVATIONS, "silu"),
        max_position_embeddings=longest,
        initializer_range=reader.number("initializer_range", 0.02),
        rms_norm_eps=reader.number("rms_norm_eps", defaults.rms_norm_eps),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        rope=read_rope(reader, head_dim=head_dim, max_position_embeddings=longest),
    )


def write_dense(architecture: ArchitectureConfig) -> dict[str, Any]:
    """The shared keys of a config.json."""
    attention, mlp = architecture.attention, architecture.mlp
    assert isinstance(attention, GroupedQueryAttention), "dense families have no latent attention"
    assert mlp is not None, "dense families have a feed-forward of their own"
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
    attention, mlp = architecture.attention, architecture.mlp
    assert isinstance(attention, GroupedQueryAttention), "dense families have no latent attention"
    assert mlp is not None, "dense families have a feed-forward of their own"
    rules = [*RULES]
    for hub, ours in _ATTENTION:
        has_bias = attention.output_bias if ours == "output" else attention.qkv_bias
        rules += _linear_rules(f"self_attn.{hub}", f"attention.{ours}", has_bias=has_bias)
    for hub, ours in _MLP:
        rules += _linear_rules(f"mlp.{hub}", f"feed_forward.{ours}", has_bias=mlp.bias)
    if attention.qk_norm == "head":
        for hub, ours in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            rules += _linear_rules(f"self_attn.{hub}", f"attention.{ours}", has_bias=False)
    return WeightRules(
        rules=tuple(rules),
        num_layers=architecture.num_layers,
        tied=architecture.tie_embeddings,
        ignorable=IGNORABLE_TENSORS,
    )


def _linear_rules(hub: str, ours: str, *, has_bias: bool) -> list[WeightRule]:
    return [
        WeightRule(f"model.layers.{{layer}}.{hub}.{kind}", f"layers.{{layer}}.{ours}.{kind}")
        for kind in (("weight", "bias") if has_bias else ("weight",))
    ]


def full_attention_layers(num_layers: int) -> tuple[LayerSpec, ...]:
    """Layers that all see everything before them."""
    return (LayerSpec(),) * num_layers
