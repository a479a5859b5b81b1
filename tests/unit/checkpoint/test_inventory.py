"""What of a run is kept: the newest, every n-th, the best; never a broken one instead of a good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from herder.checkpoint.directory import checkpoint_path, newest_checkpoint, step_of
from herder.checkpoint.inventory import checkpoints_at, checkpoints_of, keep_by, look_at
from herder.checkpoint.manifest import write_manifest
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError


def put(
    run: Path,
    step: int,
    *,
    loss: float | None = None,
    tainted: str | None = None,
    base: int | None = None,
) -> Path:
    """A checkpoint as far as retention looks at it."""
    folder = checkpoint_path(run, step, is_light=base is not None)
    folder.mkdir(parents=True)
    verdict = {"tainted": tainted, "held_out_loss": loss}
    (folder / "train_state.json").write_text(json.dumps({"verdict": verdict}))
    (folder / "weights").write_bytes(bytes(100 + step))
    write_manifest(folder, base=None if base is None else checkpoint_path(run, base))
    return folder


def names(run: Path) -> list[str]:
    return [path.name.replace("0", "") for path in checkpoints_of(run)]


def kept_steps(run: Path, **policy: int) -> list[int]:
    keep_by(run, CheckpointConfig.model_validate(policy))
    return [step_of(path) for path in checkpoints_of(run)]


def test_the_newest_every_nth_and_the_best_stay(tmp_path: Path) -> None:
    for step in range(1, 9):
        put(tmp_path, step, loss=abs(step - 3.2) if step % 2 else None)
    assert kept_steps(tmp_path, keep_last=2, keep_every=4, keep_best=2) == [3, 4, 5, 7, 8]
    assert kept_steps(tmp_path, keep_last=1, keep_best=1) == [3, 8]


def test_a_tainted_one_counts_neither_as_new_nor_as_best_nor_as_every_nth(tmp_path: Path) -> None:
    put(tmp_path, 1, loss=3.0)
    put(tmp_path, 2, loss=2.0)
    put(tmp_path, 4, loss=1.0, tainted="loss leapt")
    put(tmp_path, 5, tainted="loss leapt")
    put(tmp_path, 6, tainted="loss leapt")
    kept = kept_steps(tmp_path, keep_last=1, keep_every=4, keep_best=1)
    assert kept == [2, 6], "the newest good one, and the newest for someone to look at"
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)


def test_a_damaged_one_does_not_count_and_the_only_good_one_is_never_deleted(
    tmp_path: Path,
) -> None:
    put(tmp_path, 1)
    for step in (2, 3):
        (put(tmp_path, step) / "weights").write_bytes(b"short")
    assert kept_steps(tmp_path, keep_last=1) == [1, 3]


def test_where_none_is_good_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step, tainted="loss leapt")
    assert kept_steps(tmp_path, keep_last=2) == [2, 3]
    with pytest.raises(CheckpointError, match=r"all 2 are damaged or tainted(.|\n)*loss leapt"):
        newest_checkpoint(tmp_path)


def test_a_light_one_goes_before_the_full_one_it_rests_on(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 11, base=10)
    put(tmp_path, 20)
    put(tmp_path, 21, base=20)
    put(tmp_path, 22, base=20)
    doomed = keep_by(tmp_path, CheckpointConfig(keep_last=1, keep_every=10))
    assert [each.path.name for each in doomed] == ["light-00000011"], "10 is kept for ever"
    assert names(tmp_path) == ["step-1", "step-2", "light-21", "light-22"]
    put(tmp_path, 25)
    doomed = keep_by(tmp_path, CheckpointConfig(keep_last=1))
    assert [each.step for each in doomed] == [21, 22, 10, 20]
    assert names(tmp_path) == ["step-25"]


def test_a_light_one_says_so_when_the_full_one_is_gone_or_another(tmp_path: Path) -> None:
    base = put(tmp_path, 10)
    light = put(tmp_path, 11, base=10)
    found = look_at(light)
    assert (found.kind, found.base, found.state) == ("light", "step-00000010", "whole")
    (base / "weights").write_bytes(b"short")
    (problem,) = look_at(light).damage
    assert problem.startswith("step-00000010, which it rests on: weights has 5 bytes of 110")
    (base / "manifest.json").unlink()
    write_manifest(base)
    assert look_at(light).damage == (
        "it rests on another step-00000010 than the one that is there",
    )
    (base / "manifest.json").unlink()
    assert look_at(light).damage == ("it rests on step-00000010, which is missing",)


def test_what_was_read_is_told_part_by_part(tmp_path: Path) -> None:
    folder, told = put(tmp_path, 7), list[int]()
    found = look_at(folder, reads_contents=True, on_bytes=told.append)
    assert found.state == "whole"
    assert sum(told) == found.num_bytes > 107


def test_what_is_no_run_and_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run directory"):
        checkpoints_at(tmp_path)
