"""Bytes that a forward pass keeps for the backward pass.

Owns the list of tensors that autograd saves in one layer of model/, per token on one rank: eager
PyTorch with fused attention (scores are never stored). Tensor parallelism comes with sequence
parallelism, so the residual stream is split; the gathered input of a column-parallel product is
kept whole. Source for the method: Korthikanti et al., arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
)

GATED_MLP_TENSORS = 4
"""gate, silu(gate), up and their product: operators of down(silu(gate) * up) save one each."""
LOGIT_BYTES = 10
"""Of one logit while its chunk of the loss is computed: bf16, an fp32 copy, an fp32 gradient."""
FP32_LOGIT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: in the residual stream, and in what is computed from it."""

    residual: int
    compute: int


def layer_bytes_per_token(
    architecture: ArchitectureConfig, layer: LayerSpec, *, tp: int, widths: Widths
) -> float:
    """Saved by one layer without recompute."""
    hidden = architecture.hidden_size
    residual = 2 * hidden * widths.residual / tp
    gathered = 2 * hidden
    if architecture.branch_norm:
        residual += 2 * hidden * widths.compute / tp
    saved = gathered + _attention_elements(architecture, tp)
    return residual + widths.compute * saved + _feed_forward_bytes(architecture, layer, tp, widths)


def gradient_bytes_per_token(
    architecture: ArchitectureConfig, layer: LayerSpec, *, tp: int, widths: Widths
) -> float:
    """Gradients alive at once in a layer's backward pass: of the gated product, gate and up."""
    moe = architecture.moe
    if layer.feed_forward == "dense" or moe is None:
        assert architecture.mlp is not None, "a dense layer without mlp passed its check"
        width = architecture.mlp.intermediate_size
    else:
        width = moe.num_experts_per_token * moe.expert_intermediate_size
    return widths.compute * (3 * width / tp + 2 * architecture.hidden_size)


def checkpoint_bytes_per_token(
    architecture: ArchitectureConfig, *, tp: int, widths: Widths
) -> float:
    """Saved by one layer whose activations are computed again: its input."""
    return architecture.hidden_size * widths.residual / tp


def _attention_elements(architecture: ArchitectureConfig, tp: int) -> float:
    """Queries, keys, values as attention takes them, its output, and latents or unrotated heads."""
    attention = architecture.attention
    if isinstance(attention, GroupedQueryAttention):
        query = attention.num_attention_heads * attention.head_dim / tp
        heads = max(1.0, attention.num_key_value_heads / tp)
        keys_values = 2 * heads * attention.head_dim
        normed = query + keys_values / 2 if attention.qk_norm != "none" else 0.0
        return 2 * query + keys_values + normed
    latents = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim
    heads = attention.num_attention_heads / tp
    query_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return 2 * latents + heads * (2 * query_dim + 2 * attention.v_head_dim)


def _feed_forward_bytes(
    architecture: ArchitectureConfig, layer: LayerSpec, tp: int, widths: Widths
) -> float:
    """Routed layers keep a copy of each token for each of its experts, in and out."""
    moe = architecture.moe
    if layer.feed_forward == "dense" or moe is None:
        assert architecture.mlp is not None, "a dense layer without mlp passed its check"
        return widths.compute * GATED_MLP_TENSORS * architecture.mlp.intermediate_size / tp
    width = moe.expert_intermediate_size / tp
    routed = moe.num_experts_per_token * (2 * architecture.hidden_size + GATED_MLP_TENSORS * width)
    shared = GATED_MLP_TENSORS * (moe.shared_expert_intermediate_size or 0) / tp
    return widths.compute * (routed + shared) + 4 * moe.num_experts


def logit_bytes(
    architecture: ArchitectureConfig, *, chunk_tokens: int, tp: int, widths: Widths
) -> float:
    """The largest chunk of logits that exists at once, with its gradient."""
    each = LOGIT_BYTES if widths.compute == 2 else FP32_LOGIT_BYTES
    return chunk_tokens * architecture.vocab_size / tp * each
