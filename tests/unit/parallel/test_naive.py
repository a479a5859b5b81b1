"""nn.DataParallel over whole micro-batches: the losses of one process, documents in one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

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
from herder.model.decoder import Decoder
from herder.parallel.apply import ONE_PROCESS
from herder.parallel.naive import NaiveDataParallel, ScatteredWorks
from herder.train.optimizer import build_optimizer
from herder.train.step import StepSettings, held_out_loss, train_step

TOKENS = 24


def tiny_decoder(*, tie_embeddings: bool) -> Decoder:
    architecture = ArchitectureConfig(
        vocab_size=61,
        hidden_size=32,
        max_position_embeddings=64,
        norm=NormConfig(eps=1e-5),
        tie_embeddings=tie_embeddings,
        attention=GroupedQueryAttention(
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, scale=8**-0.5
        ),
        ropes=(RopeConfig(theta=10_000.0, rotary_dim=8),),
        mlp=MlpConfig(intermediate_size=48),
        layers=(LayerSpec(),) * 2,
        initializer_range=0.2,
    )
    decoder = build_decoder(architecture)
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=3)
    return decoder


def micro_batches(step: int, num_tokens: int = TOKENS) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    batches = []
    for number in range(3):
        tokens_T = torch.randint(0, 61, (num_tokens + 1,), generator=generator)
        lengths = (5 + number, num_tokens - 5 - number)
        batches.append(
            MicroBatch(
                tokens_T=tokens_T[:-1],
                positions_T=torch.cat([torch.arange(length) for length in lengths]),
                targets_T=tokens_T[1:],
                weights_T=torch.ones(num_tokens),
                real_T=torch.ones(num_tokens, dtype=torch.bool),
                document_lengths=lengths,
            )
        )
    return batches


def trained(*, tie_embeddings: bool, is_naive: bool) -> tuple[list[float], Decoder]:
    """Losses and gradient norms of two steps, then the held-out loss of a shorter text."""
    decoder = tiny_decoder(tie_embeddings=tie_embeddings)
    parallel = ONE_PROCESS
    if is_naive:
        naive = NaiveDataParallel(decoder, num_tokens=TOKENS, num_devices=1)
        parallel = replace(parallel, pipeline=naive)
    settings = StepSettings(
        device=torch.device("cpu"),
        precision="fp32",
        loss_chunk_tokens=16,
        clip_norm=1.0,
        parallel=parallel,
    )
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    numbers = []
    for step in range(2):
        result = train_step(decoder, optimizer, micro_batches(step), settings)
        numbers += [result.loss, result.gradient_norm]
    found = held_out_loss(decoder, micro_batches(9, num_tokens=TOKENS - 7), settings)
    assert found is not None
    return [*numbers, found[0]], decoder


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_it_trains_without_a_gpu_as_one_process_does(tie_embeddings: bool) -> None:
    expected, plain = trained(tie_embeddings=tie_embeddings, is_naive=False)
    numbers, decoder = trained(tie_embeddings=tie_embeddings, is_naive=True)
    assert numbers == pytest.approx(expected, rel=1e-6)
    for (name, actual), wanted in zip(decoder.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, msg=name)


def test_the_decoder_keeps_its_names_and_parts() -> None:
    decoder = tiny_decoder(tie_embeddings=True)
    names = list(decoder.state_dict())
    NaiveDataParallel(decoder, num_tokens=TOKENS, num_devices=1)
    assert list(decoder.state_dict()) == names
    assert decoder.head is not None
    assert decoder.embed is not None


class Work:
    """Stands for a micro-batch."""


def test_each_device_gets_one_whole_micro_batch_and_the_last_ones_may_get_none() -> None:
    scattered = ScatteredWorks(nn.Identity())
    works = [Work(), Work(), Work()]
    arguments, keywords = scattered.scatter((works,), {}, [0, 1, 2, 3])
    assert arguments == [([works[0]],), ([works[1]],), ([works[2]],)]
    assert keywords == [{}, {}, {}]
