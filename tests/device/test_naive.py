"""nn.DataParallel on the GPUs there are: the losses of one, and more memory on the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from herder.config.architecture import MlpConfig
from herder.parallel.apply import ONE_PROCESS
from herder.parallel.naive import NaiveDataParallel
from herder.train.device import num_devices, peak_memory_of_each
from tests.tiny import initialized, micro_batches, tiny_model, trainer

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("default"),  # nn.DataParallel's own, of unequal devices
]

TOKENS = 256


def losses(*, is_naive: bool) -> list[float]:
    sizes = {"vocab_size": 256, "max_position_embeddings": TOKENS}
    mlp = MlpConfig(intermediate_size=1024)
    decoder = initialized(tiny_model("dddd", head_dim=64, mlp=mlp, **sizes), "cuda")
    parallel = ONE_PROCESS
    if is_naive:
        gpus = num_devices(torch.device("cuda"))
        naive = NaiveDataParallel(decoder, num_tokens=TOKENS, num_devices=gpus)
        parallel = replace(parallel, pipeline=naive)
    run = trainer(decoder, parallel, device="cuda")
    return [run.step(micro_batches(0, 5, TOKENS)).loss for _ in range(3)]


def test_losses_are_those_of_one_gpu() -> None:
    assert losses(is_naive=True) == pytest.approx(losses(is_naive=False), rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no second GPU")
def test_the_first_gpu_holds_more_than_any_other() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    losses(is_naive=True)
    first, *others = peak_memory_of_each(torch.device("cuda", 0))
    assert first > 1.5 * max(others)
