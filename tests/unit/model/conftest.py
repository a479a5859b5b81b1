"""A tiny decoder with all three kinds of mask, and random input for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    NormConfig,
    RopeConfig,
)
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder


def tiny_config(**changes: object) -> ArchitectureConfig:
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "max_position_embeddings": 64,
        "norm": NormConfig(eps=1e-5),
        "tie_embeddings": False,
        "attention": GroupedQueryAttention(
            num_attention_heads=4, num_key_value_heads=2, head_dim=6, scale=6**-0.5
        ),
        "ropes": (RopeConfig(theta=1e4, rotary_dim=6),),
        "mlp": MlpConfig(intermediate_size=40),
        "layers": (
            LayerSpec(),
            LayerSpec(attention="sliding", window=5),
            LayerSpec(attention="chunked", window=4, rope=None),
        ),
        "initializer_range": 0.2,
    }
    return ArchitectureConfig(**(fields | changes))


def tiny_decoder(**changes: object) -> Decoder:
    decoder = build_decoder(tiny_config(**changes))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=1)
    return decoder


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ArchitectureConfig]:
    """A tiny ArchitectureConfig, fields changed by keyword."""
    return tiny_config


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Decoder]:
    """A tiny decoder with weights, fields of its config changed by keyword."""
    return tiny_decoder


@pytest.fixture(scope="session")
def pack() -> Callable[[list[int]], tuple[Tensor, Tensor]]:
    """Random tokens_T and the positions_T of documents of the given lengths."""

    def packed(lengths: list[int]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(sum(lengths))
        tokens_T = torch.randint(0, 97, (sum(lengths),), generator=generator)
        return tokens_T, torch.cat([torch.arange(length) for length in lengths])

    return packed
