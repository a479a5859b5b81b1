"""Checkpoints: whole or not there, equal to the bit, and refused where they do not belong."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import JsonValue
from safetensors.torch import save_file

from herder.checkpoint.directory import checkpoint_path, list_checkpoints, newest_checkpoint
from herder.checkpoint.manifest import verify_manifest, write_manifest
from herder.checkpoint.metadata import read_meta
from herder.checkpoint.run import (
    CheckpointWriter,
    SavedCheckpoint,
    TrainTensors,
    load_checkpoint,
)
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError
from tests.tiny import meta_at, progress_at

ARCHITECTURE: dict[str, JsonValue] = {
    "hidden_size": 8,
    "layers": [{"attention": "full"}],
    "norm": {"eps": 1e-5},
}


def tensors(*, seed: int, size: int = 8) -> TrainTensors:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, 8, generator=generator)
    return TrainTensors(
        model={"embed.weight": weight, "norm.weight": torch.randn(8, generator=generator)},
        optimizer={
            "step.embed.weight": torch.tensor(float(seed)),
            "exp_avg.embed.weight": torch.randn(size, 8, generator=generator),
        },
    )


verify_contents = partial(verify_manifest, reads_contents=True)


def save(
    run: Path,
    state: TrainTensors,
    *,
    step: int,
    keep_last: int = 3,
    model_files: Mapping[str, bytes] | None = None,
) -> SavedCheckpoint:
    started = CheckpointWriter(state).save(
        run,
        state,
        progress=progress_at(step),
        meta=meta_at(step, ARCHITECTURE),
        model_files={"config.json": b"{}"} if model_files is None else model_files,
        policy=CheckpointConfig(keep_last=keep_last),
    )
    return started.result()


def same(a: TrainTensors, b: TrainTensors) -> bool:
    pairs = [(a.model, b.model), (a.optimizer, b.optimizer)]
    return all(torch.equal(x[name], y[name]) for x, y in pairs for name in x)


def test_what_is_saved_is_loaded_to_the_last_bit_with_progress_and_random_states(
    tmp_path: Path,
) -> None:
    state = tensors(seed=1)
    saved = save(tmp_path, state, step=7)
    expected = torch.rand(3)
    other = tensors(seed=2)
    live = other.model["embed.weight"]
    progress = load_checkpoint(saved.path, other, architecture=ARCHITECTURE)
    assert same(state, other)
    assert other.model["embed.weight"] is live
    assert (progress.step, progress.tokens, progress.data.step) == (7, 70, 7)
    assert torch.equal(torch.rand(3), expected)


def test_the_folder_holds_what_a_person_and_a_model_loader_need(tmp_path: Path) -> None:
    saved = save(tmp_path, tensors(seed=1), step=7)
    assert saved.path == tmp_path / "checkpoints" / "step-00000007"
    names = {path.name for path in saved.path.iterdir()}
    assert names == {
        "model.safetensors",
        "optimizer.safetensors",
        "train_state.json",
        "experiment_meta.json",
        "config.json",
        "manifest.json",
    }
    assert read_meta(saved.path).step == 7
    sizes = sum(path.stat().st_size for path in saved.path.iterdir())
    assert saved.num_bytes == sizes - (saved.path / "manifest.json").stat().st_size


def test_a_checkpoint_of_an_older_herder_which_held_whole_tensors_still_loads(
    tmp_path: Path,
) -> None:
    state, checkpoint = tensors(seed=1), save(tmp_path, tensors(seed=2), step=7).path
    save_file(dict(state.model), checkpoint / "model.safetensors", metadata={"format": "pt"})
    save_file(dict(state.optimizer), checkpoint / "optimizer.safetensors")
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    other = tensors(seed=3)
    assert load_checkpoint(checkpoint, other, architecture=ARCHITECTURE).step == 7
    assert same(state, other)


def test_what_is_saved_in_the_background_is_what_was_there_when_it_began(tmp_path: Path) -> None:
    state = tensors(seed=1)
    release = threading.Event()

    class Waiting(dict[str, bytes]):
        def items(self) -> Any:
            assert release.wait(60)
            return super().items()

    begun = CheckpointWriter(state).save(
        tmp_path,
        state,
        progress=progress_at(5),
        meta=meta_at(5, ARCHITECTURE),
        model_files=Waiting(),
        policy=CheckpointConfig(keep_last=1),
        in_background=True,
    )
    for tensor in state.all.values():
        tensor.zero_()
    assert not begun.future.done()
    assert list_checkpoints(tmp_path) == []
    release.set()
    assert begun.result().path == checkpoint_path(tmp_path, 5)
    other = tensors(seed=3)
    load_checkpoint(begun.path, other, architecture=ARCHITECTURE)
    assert same(other, tensors(seed=1))


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, tensors(seed=step), step=step, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


def test_a_lowered_keep_last_makes_room_before_the_next_is_written(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, tensors(seed=step), step=step, keep_last=3)
    checkpoint_path(tmp_path, 4).with_name(".writing-step-00000004").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path, tensors(seed=4), step=4, keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003"]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, tensors(seed=1), step=5)
    saved = save(tmp_path, tensors(seed=2), step=5)
    other = tensors(seed=3)
    load_checkpoint(saved.path, other, architecture=ARCHITECTURE)
    assert same(other, tensors(seed=2))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_another_architecture_is_refused_with_what_differs(tmp_path: Path) -> None:
    saved = save(tmp_path, tensors(seed=1), step=1)
    other = {**ARCHITECTURE, "hidden_size": 16, "norm": {"eps": 1e-6}}
    live = tensors(seed=2)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved.path, live, architecture=other)
    assert "hidden_size: 8 there, 16 here" in str(caught.value)
    assert "norm.eps: 1e-05 there, 1e-06 here" in str(caught.value)
    assert same(live, tensors(seed=2))


def test_missing_extra_and_misshapen_tensors_are_told_together_and_nothing_is_copied(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, tensors(seed=1), step=1)
    live = tensors(seed=2, size=9)
    model = {**live.model, "head.weight": torch.zeros(2)}
    del model["norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved.path, TrainTensors(model, live.optimizer), architecture=ARCHITECTURE)
    for part in (
        "head.weight is missing",
        "norm.weight is extra",
        "embed.weight is (8, 8), wanted (9, 8)",
    ):
        assert part in str(caught.value)
    assert torch.equal(live.model["embed.weight"], tensors(seed=2, size=9).model["embed.weight"])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "train_state.json"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    saved = save(tmp_path, tensors(seed=1), step=1)
    os.truncate(saved.path / name, 10)
    with pytest.raises(CheckpointError, match=f"{name} has 10 bytes"):
        load_checkpoint(saved.path, tensors(seed=2), architecture=ARCHITECTURE)


@contextmanager
def files_no_longer_than(num_bytes: int) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_only_the_first_is_there_and_good(run: Path) -> None:
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    assert newest_checkpoint(run, verify=verify_contents) == checkpoint_path(run, 1)


@pytest.mark.parametrize("limit", [3_000, 8_500])
def test_a_save_that_cannot_be_written_leaves_nothing_and_spares_earlier_ones(
    tmp_path: Path, limit: int
) -> None:
    # 3,000 bytes end within the first file; 8,500 hold the tensors but not the extra file.
    save(tmp_path, tensors(seed=1), step=1)
    big = tensors(seed=2, size=250)
    files = {"tokenizer.json": bytes(10_000)}
    with files_no_longer_than(limit), pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path, big, step=2, model_files=files, keep_last=1)
    assert_only_the_first_is_there_and_good(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_is_told_with_what_is_needed_and_what_is_free(small_disk: Path) -> None:
    save(small_disk, tensors(seed=1), step=1)
    with pytest.raises(CheckpointError) as caught:
        save(small_disk, tensors(seed=2, size=8_000), step=2)
    assert "No space left on device" in str(caught.value)
    assert "It needs 0.5 MB, free: 0.2 MB" in str(caught.value)
    assert_only_the_first_is_there_and_good(small_disk)


KILLED_IN_A_SAVE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.checkpoint import test_run as t
class Endless(dict):
    def items(self):
        print("in the middle", flush=True)
        time.sleep(600)
t.save(Path(sys.argv[1]), t.tensors(seed=1), step=1)
t.save(Path(sys.argv[1]), t.tensors(seed=2), step=2, model_files=Endless(), keep_last=1)
"""


def test_kill_9_in_the_middle_of_a_save_leaves_the_previous_one_good(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_IN_A_SAVE, str(tmp_path), str(Path(__file__).parents[3])],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in the middle\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert any(path.name.startswith(".writing-") for path in (tmp_path / "checkpoints").iterdir())
    newest = newest_checkpoint(tmp_path, verify=verify_contents)
    assert newest == checkpoint_path(tmp_path, 1)
    other = tensors(seed=3)
    load_checkpoint(newest, other, architecture=ARCHITECTURE)
    assert same(other, tensors(seed=1))
    saved = save(tmp_path, tensors(seed=4), step=2)
    assert newest_checkpoint(tmp_path, verify=verify_contents) == saved.path
