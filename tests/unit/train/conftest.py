"""A tiny decoder and packed batches of random documents."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from herder.data.batch import MicroBatch
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from herder.train.step import StepSettings

ARCHITECTURE = ArchitectureConfig(
    vocab_size=61,
    hidden_size=32,
    max_position_embeddings=64,
    norm=NormConfig(eps=1e-5),
    tie_embeddings=True,
    attention=GroupedQueryAttention(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, scale=8**-0.5
    ),
    ropes=(RopeConfig(theta=10_000.0, rotary_dim=8),),
    mlp=MlpConfig(intermediate_size=48),
    layers=(LayerSpec(), LayerSpec()),
)


@pytest.fixture
def architecture() -> ArchitectureConfig:
    return ARCHITECTURE


@pytest.fixture
def build() -> Callable[[], Decoder]:
    """Makes equal decoders, one at each call."""

    def make() -> Decoder:
        decoder = build_decoder(ARCHITECTURE)
        materialize(decoder, device="cpu")
        initialize_weights(decoder, seed=3)
        return decoder

    return make


@pytest.fixture
def build_routed() -> Callable[..., Decoder]:
    """Makes equal decoders whose second layer is routed; arguments are fields of its MoeConfig."""

    def make(**fields: Any) -> Decoder:
        moe = {
            "num_experts": 4,
            "num_experts_per_token": 2,
            "expert_intermediate_size": 16,
            "scoring": "softmax",
            "normalize_weights": True,
            **fields,
        }
        layers = (LayerSpec(), LayerSpec(feed_forward="routed"))
        changes = {"moe": MoeConfig.model_validate(moe), "layers": layers, "initializer_range": 0.2}
        decoder = build_decoder(ARCHITECTURE.model_copy(update=changes))
        materialize(decoder, device="cpu")
        initialize_weights(decoder, seed=3)
        return decoder

    return make


@pytest.fixture
def settings() -> StepSettings:
    return StepSettings(
        device=torch.device("cpu"), precision="fp32", loss_chunk_tokens=16, clip_norm=1e9
    )


def packed(documents: Sequence[Sequence[int]], *, padding: int = 0) -> MicroBatch:
    """Documents of token ids side by side, then a padding document of weight 0."""
    reads = [list(ids[:-1]) for ids in documents] + ([[0] * padding] if padding else [])
    targets = [list(ids[1:]) for ids in documents] + ([[0] * padding] if padding else [])
    num_real = sum(len(ids) - 1 for ids in documents)
    return MicroBatch(
        tokens_T=torch.tensor([token for ids in reads for token in ids]),
        positions_T=torch.cat([torch.arange(len(ids)) for ids in reads]),
        targets_T=torch.tensor([token for ids in targets for token in ids]),
        weights_T=torch.tensor([1.0] * num_real + [0.0] * padding),
        real_T=torch.tensor([True] * num_real + [False] * padding),
        document_lengths=tuple(len(ids) for ids in reads),
    )


@pytest.fixture
def documents() -> list[list[int]]:
    """Four documents of different lengths."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randint(0, 61, (length,), generator=generator).tolist() for length in (9, 5, 17, 12)
    ]


@pytest.fixture
def pack() -> Callable[..., MicroBatch]:
    """`packed`, for tests, which cannot import this file."""
    return packed
