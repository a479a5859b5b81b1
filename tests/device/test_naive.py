"""nn.DataParallel on the GPUs there are: the losses of one, and more memory on the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.run import OptimizerConfig
from herder.data.batch import MicroBatch
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.parallel.apply import ONE_PROCESS
from herder.parallel.naive import NaiveDataParallel
from herder.train.device import num_devices, peak_memory_of_each
from herder.train.optimizer import build_optimizer
from herder.train.step import StepSettings, train_step

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("default"),  # nn.DataParallel's own, of unequal devices
]

TOKENS = 256


def micro_batch(number: int) -> MicroBatch:
    tokens_T = torch.randint(0, 256, (TOKENS + 1,), generator=torch.Generator().manual_seed(number))
    lengths = (100 + number, TOKENS - 100 - number)
    return MicroBatch(
        tokens_T=tokens_T[:-1],
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        targets_T=tokens_T[1:],
        weights_T=torch.ones(TOKENS),
        real_T=torch.ones(TOKENS, dtype=torch.bool),
        document_lengths=lengths,
    )


def losses(*, is_naive: bool) -> list[float]:
    architecture = ArchitectureConfig(
        vocab_size=256,
        hidden_size=256,
        max_position_embeddings=TOKENS,
        norm=NormConfig(eps=1e-5),
        tie_embeddings=True,
        attention=GroupedQueryAttention(
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, scale=0.125
        ),
        ropes=(RopeConfig(theta=1e4, rotary_dim=64),),
        mlp=MlpConfig(intermediate_size=1024),
        layers=(LayerSpec(),) * 4,
    )
    device = torch.device("cuda", 0)
    decoder = build_decoder(architecture)
    materialize(decoder, device=device)
    initialize_weights(decoder, seed=0)
    parallel = ONE_PROCESS
    if is_naive:
        naive = NaiveDataParallel(decoder, num_tokens=TOKENS, num_devices=num_devices(device))
        parallel = replace(parallel, pipeline=naive)
    settings = StepSettings(
        device=device, precision="fp32", loss_chunk_tokens=64, clip_norm=1.0, parallel=parallel
    )
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig(epsilon=1e-5))
    batches = [micro_batch(number) for number in range(5)]
    return [train_step(decoder, optimizer, batches, settings).loss for _ in range(3)]


def test_losses_are_those_of_one_gpu() -> None:
    assert losses(is_naive=True) == pytest.approx(losses(is_naive=False), rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_the_first_gpu_holds_more_than_any_other() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    losses(is_naive=True)
    first, *others = peak_memory_of_each(torch.device("cuda", 0))
    assert first > 1.5 * max(others)
