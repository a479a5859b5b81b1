"""Every weight of a model as data: its shape, its module, how tensor parallelism splits it.

All counts of the planner (parameters, FLOPs, bytes on a rank) are sums over these weights, so that
they cannot disagree. The rules follow ArchitectureConfig alone; no model is named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, get_args

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
)
from herder.errors import PlanError

Module = Literal[
    "embedding", "attention", "feed_forward", "router", "shared_expert", "experts", "norms", "head"
]
MODULES: tuple[Module, ...] = get_args(Module)
Split = Literal["none", "out", "in", "kv_out"]
"""What tensor parallelism does: keep a copy, split the outputs, split the inputs, or split the
key-value heads. With fewer of those than ranks, each rank holds all of them and uses one."""


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
    stays_wide: bool = False
    """Whether a matrix of a layer is left out when a model is quantized as it is loaded."""

    @property
    def num_parameters(self) -> int:
        return prod(self.shape) * self.copies

    @property
    def is_matmul(self) -> bool:
        return self.multiplies and len(self.shape) == 2

    def used_shape(self, *, tp: int, num_key_value_heads: int) -> tuple[float, ...]:
        """The shape of what one rank multiplies with; fractional only where a split is uneven."""
        degree = min(tp, num_key_value_heads) if self.split == "kv_out" else tp
        return self._split(degree)

    def local_parameters(self, *, tp: int, ep: int, num_key_value_heads: int) -> float:
        """Parameters of it that one rank holds."""
        local = prod(self._split(self._held_degree(tp, num_key_value_heads)))
        return local * self.copies / (ep if self.copies > 1 else 1)

    def held_shape(self, *, tp: int, ep: int, num_key_value_heads: int) -> tuple[int, ...]:
        """The tensor that one rank holds; experts are stacked in one."""
        shape = tuple(ceil(n) for n in self._split(self._held_degree(tp, num_key_value_heads)))
        return (ceil(self.copies / ep), *shape) if self.module == "experts" else shape

    def _held_degree(self, tp: int, num_key_value_heads: int) -> int:
        copied = self.split == "kv_out" and tp > num_key_value_heads
        return 1 if copied else tp

    def _split(self, degree: int) -> tuple[float, ...]:
        if self.split == "none" or degree == 1:
            return self.shape
        split_dim = 1 if self.split == "in" else 0
        return tuple(n / degree if dim == split_dim else n for dim, n in enumerate(self.shape))


def layer_weights(architecture: ArchitectureConfig, layer: LayerSpec) -> tuple[Weight, ...]:
    """The weights of one decoder layer. The bias of a router's choice is a buffer, not counted."""
    if layer.cross_attention or architecture.vision is not None:
        raise PlanError("planning a model with a vision encoder is not supported yet.")
    hidden, moe = architecture.hidden_size, architecture.moe
    weights = [Weight("norms", (hidden,))] * (4 if architecture.branch_norm else 2)
    weights += _attention_weights(architecture.attention, hidden)
    if layer.feed_forward == "dense":
        assert architecture.mlp is not None, "a dense layer without mlp passed its check"
        width = architecture.mlp.intermediate_size
        return (*weights, *_gated("feed_forward", hidden, width, bias=architecture.mlp.bias))
    assert moe is not None, "a routed layer without moe passed its check"
    weights += _linear("router", moe.num_experts, hidden, "none", bias=moe.router_bias)
    width, copies = moe.expert_intermediate_size, moe.num_experts
    weights += _gated("experts", hidden, width, bias=moe.expert_bias, copies=copies)
    if moe.shared_expert_intermediate_size is not None:
        weights += _gated("shared_expert", hidden, moe.shared_expert_intermediate_size, bias=False)
    if moe.shared_expert_gate:
        weights.append(Weight("shared_expert", (1, hidden)))
    return tuple(weights)


def _linear(
    module: Module, outputs: int, inputs: int, split: Split, *, bias: bool, copies: int = 1
) -> Iterator[Weight]:
    """A matrix and its bias, which is split where the outputs are."""
    yield Weight(module, (outputs, inputs), split, copies)
    if bias:
        yield Weight(module, (outputs,), "none" if split == "in" else split, copies)


def _gated(
    module: Module, hidden: int, width: int, *, bias: bool, copies: int = 1
) -> Iterator[Weight]:
    """gate, up and down."""
    for _ in range(2):
        yield from _linear(module, width, hidden, "out", bias=bias, copies=copies)
    yield from _linear(module, hidden, width, "in", bias=bias, copies=copies)


def _attention_weights(
    attention: GroupedQueryAttention | LatentAttention, hidden: int
) -> Iterator[Weight]:
    if isinstance(attention, LatentAttention):
        yield from _latent_weights(attention, hidden)
        return
    head_dim = attention.head_dim
    query, key = attention.num_attention_heads * head_dim, attention.num_key_value_heads * head_dim
    yield from _linear("attention", query, hidden, "out", bias=attention.qkv_bias)
    for _ in range(2):
        yield from _linear("attention", key, hidden, "kv_out", bias=attention.qkv_bias)
    yield from _linear("attention", hidden, query, "in", bias=attention.output_bias)
    if attention.qk_norm == "head":
        yield from (Weight("norms", (head_dim,)), Weight("norms", (head_dim,)))
    if attention.qk_norm == "projection":
        yield from (Weight("norms", (query,), "out"), Weight("norms", (key,), "kv_out"))
    if attention.sinks:
        yield Weight("attention", (attention.num_attention_heads,), "out")


def _latent_weights(attention: LatentAttention, hidden: int) -> Iterator[Weight]:
    """Down projections and latent norms are copied on every tensor-parallel rank."""
    heads, rope, bias = attention.num_attention_heads, attention.qk_rope_head_dim, attention.bias
    rank, latent = attention.q_lora_rank, attention.kv_lora_rank
    if rank is not None:
        yield from _linear("attention", rank, hidden, "none", bias=bias)
        yield Weight("norms", (rank,))
    yield Weight("attention", (heads * (attention.qk_nope_head_dim + rope), rank or hidden), "out")
    yield from _linear("attention", latent + rope, hidden, "none", bias=bias)
    yield Weight("norms", (latent,))
    expanded = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    yield Weight("attention", (expanded, latent), "out", stays_wide=True)
    yield from _linear("attention", hidden, heads * attention.v_head_dim, "in", bias=bias)


def embedding_weights(architecture: ArchitectureConfig) -> tuple[Weight, ...]:
    """What stands before the first layer."""
    shape = (architecture.vocab_size, architecture.hidden_size)
    return (Weight("embedding", shape, "out", multiplies=False),)


def head_weights(architecture: ArchitectureConfig) -> tuple[Weight, ...]:
    """What stands behind the last layer: the final norm, and the head unless it is tied."""
    norm = Weight("norms", (architecture.hidden_size,))
    head = Weight("head", (architecture.vocab_size, architecture.hidden_size), "out")
    return (norm,) if architecture.tie_embeddings else (norm, head)


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
