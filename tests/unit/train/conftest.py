"""A tiny decoder and packed batches of random documents."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from herder.config.architecture import ArchitectureConfig
from herder.data.batch import MicroBatch
from herder.model.decoder import Decoder
from herder.train.step import StepSettings
from tests.tiny import MOE, initialized, tiny_model

ARCHITECTURE = tiny_model(initializer_range=0.02)


@pytest.fixture
def architecture() -> ArchitectureConfig:
    return ARCHITECTURE


@pytest.fixture
def build() -> Callable[[], Decoder]:
    """Makes equal decoders, one at each call."""

    return lambda: initialized(ARCHITECTURE)


@pytest.fixture
def build_routed() -> Callable[..., Decoder]:
    """Makes equal decoders whose second layer is routed; arguments are fields of its MoeConfig."""

    def make(**fields: Any) -> Decoder:
        moe = MOE.model_validate({**MOE.model_dump(), **fields})
        return initialized(tiny_model("dm", moe=moe))

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
