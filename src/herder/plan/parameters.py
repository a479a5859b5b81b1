"""Every weight of a model as data: its shape, its module, how tensor parallelism splits it.

All counts of the planner (parameters, FLOPs, bytes on a rank) are sums over these weights, so that
they cannot disagree. The rules follow ArchitectureConfig alone; no model is named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MoeConfig,
)
from herder.errors import PlanError

Module = Literal[
    "embedding", "attention", "feed_forward", "router", "shared_expert", "experts", "norms", "head"
]
MODULES: tuple[Module, ...] = (
    "embedding",
    "attention",
    "feed_forward",
    "router",
    "shared_expert",
    "experts",
    "norms",
    "head",
)
Split = Literal["none", "out", "in", "kv_out"]
"""What tensor parallelism does: keep a copy, split the outputs, split the inputs, or split the
key-value heads as far as there are any and copy them beyond."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor, or `copies` equal ones; `shape` is (outputs, inputs) for a matrix."""

    module: Module
    shape: tuple[int, ...]
    split: Split = "none"
    copies: int = 1
    """How many experts have one; expert parallelism divides them."""
    multiplies: bool = True
    """Whether a matrix is multiplied with each token it sees (an embedding is only looked up)."""

    @property
    def num_parameters(self) -> int:
        return prod(self.shape) * self.copies

    @property
    def is_matmul(self) -> bool:
        return self.multiplies and len(self.shape) == 2

    def local_parameters(self, *, tp: int, ep: int, num_key_value_heads: int) -> float:
        """Parameters of it on one rank; fractional only where a split is uneven."""
        degree = {"none": 1, "kv_out": min(tp, num_key_value_heads)}.get(self.split, tp)
        return self.num_parameters / degree / (ep if self.copies > 1 else 1)


def layer_weights(architecture: ArchitectureConfig, layer: LayerSpec) -> tuple[Weight, ...]:
    """The weights of one decoder layer."""
    if layer.cross_attention or architecture.vision is not None:
        raise PlanError("planning a model with a vision encoder is not supported yet.")
    hidden = architecture.hidden_size
    norms = 4 if architecture.branch_norm else 2
    weights = [Weight("norms", (hidden,)) for _ in range(norms)]
    attention = architecture.attention
    if isinstance(attention, GroupedQueryAttention):
        weights += _grouped_query_weights(attention, hidden)
    else:
        weights += _latent_weights(attention, hidden)
    if layer.feed_forward == "dense":
        mlp = architecture.mlp
        assert mlp is not None, "a dense layer without mlp passed ArchitectureConfig's check"
        width = mlp.intermediate_size
        weights += _gated("feed_forward", hidden, width, bias=mlp.bias)
    else:
        assert architecture.moe is not None, "a routed layer without moe passed its check"
        weights += _moe_weights(architecture.moe, hidden)
    return tuple(weights)


def _grouped_query_weights(attention: GroupedQueryAttention, hidden: int) -> Iterator[Weight]:
    query = attention.num_attention_heads * attention.head_dim
    key = attention.num_key_value_heads * attention.head_dim
    yield Weight("attention", (query, hidden), "out")
    yield Weight("attention", (key, hidden), "kv_out")
    yield Weight("attention", (key, hidden), "kv_out")
    yield Weight("attention", (hidden, query), "in")
    if attention.qkv_bias:
        yield Weight("attention", (query,), "out")
        yield Weight("attention", (key,), "kv_out")
        yield Weight("attention", (key,), "kv_out")
    if attention.output_bias:
        yield Weight("attention", (hidden,))
    if attention.qk_norm == "head":
        yield Weight("norms", (attention.head_dim,))
        yield Weight("norms", (attention.head_dim,))
    if attention.qk_norm == "projection":
        yield Weight("norms", (query,), "out")
        yield Weight("norms", (key,), "kv_out")
    if attention.sinks:
        yield Weight("attention", (attention.num_attention_heads,), "out")


def _latent_weights(attention: LatentAttention, hidden: int) -> Iterator[Weight]:
    """Down projections and latent norms are copied on every tensor-parallel rank."""
    heads, rope = attention.num_attention_heads, attention.qk_rope_head_dim
    query = heads * (attention.qk_nope_head_dim + rope)
    rank, latent = attention.q_lora_rank, attention.kv_lora_rank
    if rank is None:
        yield Weight("attention", (query, hidden), "out")
    else:
        yield Weight("attention", (rank, hidden))
        yield Weight("norms", (rank,))
        yield Weight("attention", (query, rank), "out")
    yield Weight("attention", (latent + rope, hidden))
    yield Weight("norms", (latent,))
    expanded = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    yield Weight("attention", (expanded, latent), "out")
    yield Weight("attention", (hidden, heads * attention.v_head_dim), "in")
    if attention.bias:
        if rank is not None:
            yield Weight("attention", (rank,))
        yield Weight("attention", (latent + rope,))
        yield Weight("attention", (hidden,))


def _gated(
    module: Module, hidden: int, width: int, *, bias: bool, copies: int = 1
) -> Iterator[Weight]:
    """gate, up and down, with their biases."""
    yield Weight(module, (width, hidden), "out", copies)
    yield Weight(module, (width, hidden), "out", copies)
    yield Weight(module, (hidden, width), "in", copies)
    if bias:
        yield Weight(module, (width,), "out", copies)
        yield Weight(module, (width,), "out", copies)
        yield Weight(module, (hidden,), "none", copies)


def _moe_weights(moe: MoeConfig, hidden: int) -> Iterator[Weight]:
    """The bias that corrects the choice is a buffer and not counted, as in transformers."""
    yield Weight("router", (moe.num_experts, hidden))
    if moe.router_bias:
        yield Weight("router", (moe.num_experts,))
    yield from _gated(
        "experts",
        hidden,
        moe.expert_intermediate_size,
        bias=moe.expert_bias,
        copies=moe.num_experts,
    )
    if moe.shared_expert_intermediate_size is not None:
        yield from _gated("shared_expert", hidden, moe.shared_expert_intermediate_size, bias=False)
    if moe.shared_expert_gate:
        yield Weight("shared_expert", (1, hidden))


def embedding_weights(architecture: ArchitectureConfig) -> tuple[Weight, ...]:
    """What stands before the first layer."""
    shape = (architecture.vocab_size, architecture.hidden_size)
    return (Weight("embedding", shape, "out", multiplies=False),)


def head_weights(architecture: ArchitectureConfig) -> tuple[Weight, ...]:
    """What stands behind the last layer: the final norm, and the head unless it is tied."""
    norm = Weight("norms", (architecture.hidden_size,))
    if architecture.tie_embeddings:
        return (norm,)
    return (norm, Weight("head", (architecture.vocab_size, architecture.hidden_size), "out"))


def all_weights(architecture: ArchitectureConfig) -> Iterator[tuple[Weight, int]]:
    """Each distinct weight and how often the model has it."""
    for weight in (*embedding_weights(architecture), *head_weights(architecture)):
        yield weight, 1
    for layer, times in Counter(architecture.layers).items():
        for weight in layer_weights(architecture, layer):
            yield weight, times


def parameters_by_module(architecture: ArchitectureConfig) -> dict[Module, int]:
    """Exact parameter counts; a tied head counts nothing, modules a model lacks are left out."""
    counts: Counter[Module] = Counter()
    for weight, times in all_weights(architecture):
        counts[weight.module] += times * weight.num_parameters
    return {module: counts[module] for module in MODULES if counts[module]}


def parameter_count(architecture: ArchitectureConfig) -> int:
    """Exact number of parameters, buffers excluded: that of the built model."""
    return sum(parameters_by_module(architecture).values())


def active_parameter_count(architecture: ArchitectureConfig) -> int:
    """Parameters that one token meets: experts count for k of E, the input embedding counts whole.

    Vendors mostly leave the input embedding out.
    """
    counts = parameters_by_module(architecture)
    moe = architecture.moe
    if moe is None:
        return sum(counts.values())
    experts = counts.get("experts", 0)
    idle = experts * (moe.num_experts - moe.num_experts_per_token) // moe.num_experts
    return sum(counts.values()) - idle
