"""What decoders have in common as keys of a config.json: read into a record, and written.

Owns the shared part only; windows, scoring and groups that set families apart stay in their files.
Four keys of experts are of this project and of training alone: no published file has them.
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
    MoeConfig,
    RopeConfig,
)
from herder.families.reading import ConfigReader
from herder.families.rope import THETA, read_rope, write_rope

_ACTIVATIONS: dict[str, Activation] = {
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_HF_ACTIVATIONS = {ours: hf for hf, ours in _ACTIVATIONS.items()}
_AUX_LOSS, _Z_LOSS = "router_aux_loss_coef", "router_z_loss_coef"
_NOISE, _UPDATE_RATE = "router_noise", "router_bias_update_rate"

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
"""What the tiny models of families share; each adds widths of its own."""


@dataclass(frozen=True)
class HfClass:
    """A family's own class in transformers 5.24: what absent keys mean, and what some are called.

    None: there is no such key, unless said otherwise.
    """

    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rope_theta: float = THETA
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    """Of q, k, v and o alike."""
    mlp_bias: bool | None = None
    norm_topk_prob: bool | None = None
    router_aux_loss_coef: float | None = None
    mlp_width: str = "intermediate_size"
    """The key of a dense layer's width."""
    expert_width: str | None = None
    """The key of an expert's width; None: there are no experts."""
    expert_counts: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Names of one number, the first of which is written: transformers reads either, and renames it
    in some families on saving."""


def read(
    reader: ConfigReader,
    hf_class: HfClass,
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
    num_kv_heads = reader.optional_integer("num_key_value_heads", hf_class.num_key_value_heads)
    head_dim = read_head_dim(reader, hf_class)
    has_bias = _read_bias(reader, "attention_bias", hf_class.attention_bias)
    shared = read_shared(reader, hf_class, rope={"head_dim": head_dim, **(rope or {})}, **others)
    reader.finish()
    grouped = {
        "kind": "grouped_query",
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "scale": head_dim**-0.5,
    }
    return ArchitectureConfig.model_validate(
        {**shared, "attention": {**grouped, **(attention or {})}}
    )


def read_head_dim(reader: ConfigReader, hf_class: HfClass) -> int:
    """head_dim, or what its absence or null means."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.optional_integer("head_dim", hf_class.head_dim)
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
    hf_class: HfClass,
    *,
    rope: Mapping[str, Any],
    layers: Iterable[LayerSpec] | None = None,
    routed: Container[int] | None = None,
    ropes: tuple[RopeConfig, ...] | None = None,
    norm: Mapping[str, Any] | None = None,
    moe: Mapping[str, Any] | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    **fields: Any,
) -> dict[str, Any]:
    """Fields of the architecture that all families have; to be made a record once all is read.

    rope: arguments of `read_rope`, unless the family read its `ropes` itself. layers: absent, all
    are alike. routed: of a family with experts, the layers that have them; absent, all. norm, moe:
    fields of those records that the family knows. fields: the rest.
    """
    num_layers = reader.integer("num_hidden_layers")
    has_experts = [moe is not None and (routed is None or i in routed) for i in range(num_layers)]
    longest = reader.integer("max_position_embeddings", hf_class.max_position_embeddings)
    given: dict[str, Any] = {
        "max_position_embeddings": longest,
        "theta": hf_class.rope_theta,
        **rope,
    }
    kind = reader.choice(activation_key, _ACTIVATIONS, activation)
    has_bias = _read_bias(reader, "mlp_bias", hf_class.mlp_bias)
    mlp = None
    if not all(has_experts):
        width = reader.integer(hf_class.mlp_width)
        mlp = {"intermediate_size": width, "activation": kind, "bias": has_bias}
    reader.ignore(hf_class.mlp_width)
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "max_position_embeddings": longest,
        "norm": {"eps": reader.number("rms_norm_eps", hf_class.rms_norm_eps), **(norm or {})},
        "tie_embeddings": reader.boolean("tie_word_embeddings", hf_class.tie_word_embeddings),
        "ropes": ropes or (read_rope(reader, **given),),
        "initializer_range": reader.number("initializer_range", 0.02),
        "layers": tuple(
            layer.model_copy(update={"feed_forward": "routed"}) if has else layer
            for layer, has in zip(layers or [LayerSpec()] * num_layers, has_experts, strict=False)
        ),
        "mlp": mlp,
        "moe": None
        if moe is None
        else _read_experts(reader, hf_class, {"activation": kind, **moe}),
        **fields,
    }


def _read_bias(reader: ConfigReader, key: str, default: bool | None) -> bool:
    return default is not None and reader.boolean(key, default)


def _read_experts(
    reader: ConfigReader, hf_class: HfClass, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of a MoeConfig; those that the family knows win."""
    keys = hf_class.expert_counts
    given = [key for key in keys if reader.has(key)]
    counts = [reader.integer(key) for key in given or keys[:1]]
    if len(set(counts)) > 1:
        reader.problem(f"{' and '.join(given)} are one number, but here they differ: {counts}")
    reader.ignore(*keys, "output_router_logits")
    read: dict[str, Any] = {
        "num_experts": counts[0],
        "num_experts_per_token": reader.integer("num_experts_per_tok"),
        "expert_intermediate_size": reader.integer(hf_class.expert_width or hf_class.mlp_width),
        "z_loss_coefficient": reader.number(_Z_LOSS, 0.0, may_be_zero=True),
    }
    if (normalizes := hf_class.norm_topk_prob) is not None:
        read["normalize_weights"] = reader.boolean("norm_topk_prob", normalizes)
    if (default := hf_class.router_aux_loss_coef) is not None:
        read["aux_loss_coefficient"] = reader.number(_AUX_LOSS, default, may_be_zero=True)
    noise = reader.optional_section(_NOISE)
    if noise is not None:
        std, steps = noise.number("std"), noise.integer("decay_steps")
        read["noise"] = {"std": std, "decay_steps": steps}
    if fields.get("correction_bias"):
        rate = reader.number(_UPDATE_RATE, 0.0, may_be_zero=True)
        read["correction_bias_update_rate"] = rate
    return {**read, **fields}


def attention_of(architecture: ArchitectureConfig) -> GroupedQueryAttention:
    """The attention of a family without latent attention."""
    attention = architecture.attention
    assert isinstance(attention, GroupedQueryAttention), "this family has no latent attention"
    return attention


def experts_of(architecture: ArchitectureConfig) -> MoeConfig:
    """The experts of a family that has them."""
    assert architecture.moe is not None, "this family has routed experts"
    return architecture.moe


def write(architecture: ArchitectureConfig, hf_class: HfClass) -> dict[str, Any]:
    """The shared keys of a config.json."""
    attention, mlp = architecture.attention, architecture.mlp
    feed_forward = mlp or architecture.moe
    assert feed_forward is not None, "every architecture has feed-forwards"
    keys: dict[str, Any] = {
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": attention.num_attention_heads,
        "hidden_act": _HF_ACTIVATIONS.get(feed_forward.activation, feed_forward.activation),
        "max_position_embeddings": architecture.max_position_embeddings,
        "initializer_range": architecture.initializer_range,
        "rms_norm_eps": architecture.norm.eps,
        "tie_word_embeddings": architecture.tie_embeddings,
        **write_rope(architecture.ropes[0]),
    }
    if isinstance(attention, GroupedQueryAttention):
        keys["num_key_value_heads"] = attention.num_key_value_heads
        keys["head_dim"] = attention.head_dim
        if hf_class.attention_bias is not None:
            keys["attention_bias"] = attention.output_bias
    if mlp is not None:
        keys[hf_class.mlp_width] = mlp.intermediate_size
        if hf_class.mlp_bias is not None:
            keys["mlp_bias"] = mlp.bias
    return keys | _write_experts(architecture, hf_class)


def _write_experts(architecture: ArchitectureConfig, hf_class: HfClass) -> dict[str, Any]:
    """Keys of training only where they say something."""
    if hf_class.expert_width is None:
        return {}
    moe = experts_of(architecture)
    keys: dict[str, Any] = {
        hf_class.expert_counts[0]: moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        hf_class.expert_width: moe.expert_intermediate_size,
    }
    if hf_class.norm_topk_prob is not None:
        keys["norm_topk_prob"] = moe.normalize_weights
    if hf_class.router_aux_loss_coef is not None:
        keys[_AUX_LOSS] = moe.aux_loss_coefficient
    training = {
        _Z_LOSS: moe.z_loss_coefficient,
        _NOISE: moe.noise and moe.noise.model_dump(),
        _UPDATE_RATE: moe.correction_bias_update_rate,
    }
    return keys | {key: value for key, value in training.items() if value}
