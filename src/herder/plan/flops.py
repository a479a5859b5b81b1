"""Floating-point operations and key-value bytes of one token.

Owns the convention: **model FLOPs**, two per multiply-accumulate, of the matrix products and of
attention, without recompute, norms, activations or the embedding lookup. Attention counts the keys
that each query sees under its mask, window or chunk, as a fused kernel computes them: about half of
the square that PaLM's appendix B and most older tables count. A sink is no key. Latent attention
counts expanded, as it trains. A token pays for its k experts and the shared one, never for the
rest. A backward pass is twice its forward pass.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LayerSpec
from herder.plan.parameters import MODULES, Module, all_weights

TRAINING_PASSES = 3
"""Forward, and backward for inputs and for weights. Source: PaLM, arXiv:2204.02311, appendix B."""


def mean_keys(layer: LayerSpec, sequence_length: int) -> float:
    """Keys that a query of this layer sees, itself included, averaged over a sequence."""
    window = min(layer.window or sequence_length, sequence_length)
    chunks, rest = divmod(sequence_length, window)
    if layer.attention == "chunked":
        seen = (chunks * window * (window + 1) + rest * (rest + 1)) / 2
    else:
        seen = window * (window + 1) / 2 + (sequence_length - window) * window
    return seen / sequence_length


def attention_flops_per_key(architecture: ArchitectureConfig) -> int:
    """Of one query and one key in one layer: the scores and the weighted sum of values."""
    attention = architecture.attention
    if isinstance(attention, GroupedQueryAttention):
        return 4 * attention.num_attention_heads * attention.head_dim
    score_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return 2 * attention.num_attention_heads * (score_dim + attention.v_head_dim)


def forward_flops_by_module(
    architecture: ArchitectureConfig, *, sequence_length: int
) -> dict[Module | Literal["scores"], float]:
    """FLOPs of one token's forward pass. `scores` is attention itself, without its projections."""
    moe = architecture.moe
    routed_share = moe.num_experts_per_token / moe.num_experts if moe else 1.0
    counts: Counter[Module] = Counter()
    for weight, times in all_weights(architecture):
        if weight.is_matmul:
            share = routed_share if weight.module == "experts" else 1.0
            counts[weight.module] += round(2 * weight.num_parameters * times * share)
    if architecture.tie_embeddings:
        counts["head"] = 2 * architecture.vocab_size * architecture.hidden_size
    keys = sum(
        times * mean_keys(layer, sequence_length)
        for layer, times in Counter(architecture.layers).items()
    )
    scores = attention_flops_per_key(architecture) * keys
    return {**{name: float(counts[name]) for name in MODULES if counts[name]}, "scores": scores}


def flops_per_token(
    architecture: ArchitectureConfig,
    *,
    sequence_length: int,
    phase: Literal["forward", "training"] = "training",
) -> float:
    """Model FLOPs of one token in sequences of this length, by the convention of this module."""
    by_module = forward_flops_by_module(architecture, sequence_length=sequence_length)
    return sum(by_module.values()) * (TRAINING_PASSES if phase == "training" else 1)


def key_value_elements(architecture: ArchitectureConfig, *, tensor_parallel_size: int = 1) -> int:
    """Numbers that one layer keeps of one token on one rank.

    Key-value heads split over ranks down to one head each. The latent of MLA is one head, so that
    every rank keeps all of it. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.4.
    """
    attention = architecture.attention
    if isinstance(attention, GroupedQueryAttention):
        heads = -(-attention.num_key_value_heads // tensor_parallel_size)
        return 2 * max(1, heads) * attention.head_dim
    return attention.kv_lora_rank + attention.qk_rope_head_dim


def kv_bytes_per_sequence(
    architecture: ArchitectureConfig,
    *,
    layers: Counter[LayerSpec],
    num_tokens: int,
    bytes_per_element: float,
    tensor_parallel_size: int = 1,
) -> float:
    """Cache bytes on a GPU that holds `layers`: one with a window or chunk keeps no more than that.

    num_tokens=1 is what one more token takes while every layer still grows.
    """
    elements = key_value_elements(architecture, tensor_parallel_size=tensor_parallel_size)
    kept = sum(n * min(num_tokens, layer.window or num_tokens) for layer, n in layers.items())
    return kept * elements * bytes_per_element
