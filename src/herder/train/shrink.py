"""A model of debug size that is split as the given one is: what `herder verify` runs.

Owns which numbers may become small and which choices must stay: every kind of layer in its order,
the ratio of query to key-value heads, norms, biases, sinks, how experts are scored, grouped and
chosen, tied or not. A record in, a record out; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, islice, pairwise

from herder.config.architecture import (
    ArchitectureConfig,
    Attention,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MlpConfig,
    MoeConfig,
    RopeConfig,
)

HIDDEN_SIZE = 32
VOCAB_SIZE = 64
"""Divisible by every degree that eight ranks can be split into."""
HEAD_DIM = 8
INTERMEDIATE_SIZE = 48
EXPERT_INTERMEDIATE_SIZE = 16
LATENT_RANK = 16
MAX_HEADS_PER_KV_HEAD = 8
MAX_TENSOR_DEGREE = 4
"""Tensor-parallel degrees up to this that the model allows, the small one allows too."""
MIN_LAYERS = 4
"""Two stages of two rounds each, which interleaved pipelines take."""
WINDOWS = (6, 10, 14)
"""Lengths that the model's windows get, shortest first: documents of a step are longer."""
MAX_POSITION_EMBEDDINGS = 64


def shrunk(architecture: ArchitectureConfig) -> ArchitectureConfig:
    """The same kind of model, small enough that a step on a CPU takes milliseconds.

    Weights start with a spread of hidden_size**-0.5: at the usual 0.02 a model this narrow would
    attend evenly and route evenly, and hide what goes wrong there.
    """
    attention, rotated = _attention(architecture.attention)
    old_width = architecture.hidden_size
    scales_embedding = math.isclose(architecture.embedding_scale, old_width**0.5, rel_tol=1e-3)
    return architecture.model_copy(
        update={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            "attention": attention,
            "ropes": tuple(
                _rope(rope, architecture.attention, head_dim=rotated) for rope in architecture.ropes
            ),
            "mlp": _mlp(architecture.mlp),
            "moe": _moe(architecture.moe),
            "layers": _windowed(_layers(architecture.layers)),
            "embedding_scale": HIDDEN_SIZE**0.5
            if scales_embedding
            else architecture.embedding_scale,
            "initializer_range": HIDDEN_SIZE**-0.5,
        }
    )


def _attention(attention: Attention) -> tuple[Attention, int]:
    """(small attention, how many dims of a head may rotate)."""
    if isinstance(attention, LatentAttention):
        return _latent(attention)
    temperature = attention.temperature
    if temperature is not None:
        temperature = temperature.model_copy(update={"floor_tokens": 4})
    num_attention_heads, num_key_value_heads = _heads(attention)
    small = attention.model_copy(
        update={
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": HEAD_DIM,
            "scale": attention.scale * (attention.head_dim / HEAD_DIM) ** 0.5,
            "temperature": temperature,
        }
    )
    return small, HEAD_DIM


def _heads(attention: GroupedQueryAttention) -> tuple[int, int]:
    """(query heads, key-value heads): as many of the first to one of the second as there were.

    At least two key-value heads, where there are, and as many as keep tensor-parallel degrees legal
    that are so for the whole model.
    """
    heads, kv_heads = attention.num_attention_heads, attention.num_key_value_heads
    ratio = _largest_divisor(heads // kv_heads, at_most=MAX_HEADS_PER_KV_HEAD)
    wanted = math.gcd(heads, MAX_TENSOR_DEGREE)
    for count in range(min(2, kv_heads), kv_heads):
        if kv_heads % count == 0 and math.gcd(count * ratio, MAX_TENSOR_DEGREE) == wanted:
            return count * ratio, count
    return kv_heads * ratio, kv_heads


def _latent(attention: LatentAttention) -> tuple[LatentAttention, int]:
    rotated = HEAD_DIM // 2
    old_width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    small = attention.model_copy(
        update={
            "num_attention_heads": math.gcd(attention.num_attention_heads, MAX_TENSOR_DEGREE),
            "q_lora_rank": None if attention.q_lora_rank is None else LATENT_RANK,
            "kv_lora_rank": LATENT_RANK,
            "qk_nope_head_dim": HEAD_DIM,
            "qk_rope_head_dim": rotated,
            "v_head_dim": HEAD_DIM,
            "scale": attention.scale * (old_width / (HEAD_DIM + rotated)) ** 0.5,
        }
    )
    return small, rotated


def _rope(rope: RopeConfig, attention: Attention, *, head_dim: int) -> RopeConfig:
    """The same share of a head rotates, by the same scaling; a list of divisors is thinned out."""
    is_latent = isinstance(attention, LatentAttention)
    whole = attention.qk_rope_head_dim if is_latent else attention.head_dim
    pairs = max(1, rope.rotary_dim * head_dim // whole // 2)
    factors = {
        name: tuple(given[len(given) * pair // pairs] for pair in range(pairs))
        for name in ("short_factor", "long_factor")
        if (given := getattr(rope.scaling, name, None)) is not None
    }
    scaling = rope.scaling.model_copy(update=factors)
    return rope.model_copy(update={"rotary_dim": 2 * pairs, "scaling": scaling})


def _mlp(mlp: MlpConfig | None) -> MlpConfig | None:
    return mlp and mlp.model_copy(update={"intermediate_size": INTERMEDIATE_SIZE})


def _moe(moe: MoeConfig | None) -> MoeConfig | None:
    """Twice as many experts as a token may meet, where there are; all groups, at least two each."""
    if moe is None:
        return None
    groups, chosen = moe.num_groups, moe.num_experts_per_token
    each = max(2, -(-2 * chosen // moe.num_groups_per_token), -(-4 // groups))
    shared = moe.shared_expert_intermediate_size
    if shared is not None:
        shared = EXPERT_INTERMEDIATE_SIZE * (1 if shared <= moe.expert_intermediate_size else 2)
    return moe.model_copy(
        update={
            "num_experts": min(moe.num_experts, groups * each),
            "expert_intermediate_size": EXPERT_INTERMEDIATE_SIZE,
            "shared_expert_intermediate_size": shared,
        }
    )


def _layers(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The shortest beginning of the pattern that has every kind and every change of kind.

    Runs of equal layers are cut short first, then, where that leaves too few, less short; a model
    of fewer layers gets its last one again.
    """
    short: list[LayerSpec] = []
    for longest in range(1, MIN_LAYERS + 1):
        short = [each for _, run in groupby(layers) for each in islice(run, longest)]
        needed = max(MIN_LAYERS, _covering(short))
        if len(short) >= needed:
            return tuple(short[:needed])
    return (*short, *short[-1:] * (MIN_LAYERS - len(short)))


def _covering(layers: Sequence[LayerSpec]) -> int:
    """How many of the first layers have all kinds, and all pairs of neighbours, that there are."""
    kinds, changes = set(layers), set(pairwise(layers))
    lengths = range(1, len(layers) + 1)
    return next(
        length
        for length in lengths
        if set(layers[:length]) == kinds and set(pairwise(layers[:length])) == changes
    )


def _windowed(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Windows and chunks that are shorter than documents; different ones stay different."""
    old = sorted({layer.window for layer in layers if layer.window is not None})
    new = {window: WINDOWS[min(place, len(WINDOWS) - 1)] for place, window in enumerate(old)}
    return tuple(
        layer if layer.window is None else layer.model_copy(update={"window": new[layer.window]})
        for layer in layers
    )


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(each for each in range(min(number, at_most), 0, -1) if number % each == 0)
