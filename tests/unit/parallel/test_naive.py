"""nn.DataParallel over whole micro-batches: the losses of one process, documents in one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from herder.model.decoder import Decoder
from herder.parallel.apply import ONE_PROCESS
from herder.parallel.naive import NaiveDataParallel, ScatteredWorks
from herder.train.step import held_out_loss
from tests.tiny import initialized, micro_batches, tiny_model, trainer

TOKENS = 24


def trained(*, tie_embeddings: bool, is_naive: bool) -> tuple[list[float], Decoder]:
    """Losses and gradient norms of two steps, then the held-out loss of a shorter text."""
    decoder = initialized(tiny_model(tie_embeddings=tie_embeddings))
    parallel = ONE_PROCESS
    if is_naive:
        naive = NaiveDataParallel(decoder, num_tokens=TOKENS, num_devices=1)
        parallel = replace(parallel, pipeline=naive)
    run = trainer(decoder, parallel)
    results = [run.step(micro_batches(step, 3, TOKENS)) for step in range(2)]
    numbers = [number for each in results for number in (each.loss, each.gradient_norm)]
    found = held_out_loss(decoder, micro_batches(9, 3, TOKENS - 7), run.settings)
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
    decoder = initialized(tiny_model())
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
