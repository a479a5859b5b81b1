"""Light checkpoints: the weights of their step to the bit, small, of no use without a full one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from herder.checkpoint.directory import checkpoint_path, list_light
from herder.checkpoint.run import CheckpointWriter, SavedCheckpoint, TrainTensors
from herder.checkpoint.sharded import load_tensors, read_metadata, tensors_of
from herder.checkpoint.source import model_pieces
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError
from tests.tiny import meta_at, progress_at


def state() -> TrainTensors:
    """Of every dtype that a model has, and values that a difference could lose."""
    made = torch.Generator().manual_seed(1)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38, -1.0])
    model = {
        "large": torch.randn(300, 300, generator=made),
        "half": torch.randn(64, 3, generator=made).bfloat16(),
        "odd": odd,
        "count": torch.tensor([2**62, -5, 0]),
        "scalar": torch.tensor(3.0),
    }
    return TrainTensors(model=model, optimizer={"exp_avg.large": torch.zeros(300, 300)})


def save(
    writer: CheckpointWriter,
    run: Path,
    tensors: TrainTensors,
    step: int,
    base: Path | None = None,
    *,
    in_background: bool = False,
) -> SavedCheckpoint:
    return writer.save(
        run,
        tensors,
        progress=progress_at(step),
        meta=meta_at(step, {}),
        model_files={"config.json": b"{}"},
        policy=CheckpointConfig(keep_last=1),
        in_background=in_background,
        base=base,
    ).result()


def train(tensors: TrainTensors) -> None:
    """Moves values about as far as a step does, and some from one extreme to the other."""
    for name, tensor in tensors.model.items():
        if name == "odd":
            tensor.copy_(tensor.flip(0))
        elif name == "count":
            tensor.neg_()
        else:
            tensor.mul_(1.001).add_(1e-4)
    tensors.model["large"].view(-1)[::1000] *= -1e30


@pytest.mark.parametrize("in_background", [False, True])
def test_weights_come_back_to_the_last_bit_and_are_small(
    tmp_path: Path, in_background: bool
) -> None:
    tensors = state()
    writer = CheckpointWriter(tensors)
    full = save(writer, tmp_path, tensors, 1, in_background=in_background)
    train(tensors)
    light = save(writer, tmp_path, tensors, 2, full.path, in_background=in_background)
    assert light.path == checkpoint_path(tmp_path, 2, is_light=True)
    assert light.num_bytes < 0.5 * full.num_bytes
    stored = read_metadata(model_pieces(light.path))
    assert tensors_of(stored).keys() == tensors.model.keys()
    for name, tensor in tensors.model.items():
        found = torch.zeros_like(tensor)
        load_tensors({name: found}, stored)
        bits, wanted = (x.reshape(-1).view(torch.uint8) for x in (found, tensor))
        assert torch.equal(bits, wanted), name
    train(tensors)
    save(writer, tmp_path, tensors, 3, in_background=in_background)
    assert list_light(tmp_path) == [], "gone with the full one that keep_last no longer keeps"


def test_without_its_full_checkpoint_it_is_refused(tmp_path: Path) -> None:
    tensors = state()
    writer = CheckpointWriter(tensors)
    full = save(writer, tmp_path, tensors, 1)
    light = save(writer, tmp_path, tensors, 2, full.path)
    (full.path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="step-00000001, which it rests on: model"):
        read_metadata(model_pieces(light.path))


def test_a_light_one_that_decayed_is_refused(tmp_path: Path) -> None:
    tensors = state()
    writer = CheckpointWriter(tensors)
    full = save(writer, tmp_path, tensors, 1)
    train(tensors)
    (delta,) = model_pieces(save(writer, tmp_path, tensors, 2, full.path).path)
    content = bytearray(delta.read_bytes())
    content[len(content) // 4] ^= 1
    delta.write_bytes(content)
    with pytest.raises(CheckpointError, match="large cannot be restored"):
        load_tensors({"large": torch.zeros(300, 300)}, read_metadata([delta]))
