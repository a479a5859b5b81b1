"""Disks that fill and files that are damaged, where ranks write them: all come to the same."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from herder.checkpoint.directory import checkpoint_path, list_checkpoints
from herder.checkpoint.run import CheckpointWriter, TrainTensors
from herder.config.run import CheckpointConfig, RunConfig
from herder.errors import CheckpointError
from herder.observe.events import Bus, Event, Incident
from herder.parallel.mesh import build_mesh, storage_group
from herder.parallel.ranks import run_on_ranks
from herder.train.resume import find_checkpoint
from tests.tiny import LLAMA_JSON, meta_at, plan_on_cpus, progress_at, tiny_model

ARCHITECTURE = {"hidden_size": 8}
NAMES = ("a.weight", "b.weight", "c.weight", "d.weight")


class Incidents:
    """A sink that keeps what went wrong."""

    def __init__(self) -> None:
        self.told = list[str]()

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        if isinstance(event, Incident):
            self.told.append(event.message)

    def close(self) -> None: ...


def recipe(run_directory: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_directory": str(run_directory),
            "model": {"config": LLAMA_JSON, "initialize": "random"},
            "checkpoint": {"every_steps": 1},
        }
    )


def save_on_this_rank(
    run_directory: Path, steps: list[int], *, fills: int | None = None, in_background: bool = False
) -> str:
    """Save steps one after the other, what went wrong with the last one.

    fills: the rank that finds no room for the last one.
    """
    mesh = build_mesh(plan_on_cpus(tiny_model(), 2).mesh_axes, "cpu")
    model = {name: torch.full((250, 8), float(place)) for place, name in enumerate(NAMES)}
    state = TrainTensors(model=model, optimizer={f"exp_avg.{n}": x + 9 for n, x in model.items()})
    writer = CheckpointWriter(state, storage_group(mesh))
    config = recipe(run_directory).model_dump(mode="json")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step in steps:
            if step == steps[-1] and dist.get_rank() == fills:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
            writer.save(
                run_directory,
                state,
                progress=progress_at(step),
                meta=meta_at(step, ARCHITECTURE, config),
                model_files={},
                policy=CheckpointConfig(keep_last=3),
                in_background=in_background,
            ).result()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


@pytest.mark.parametrize(("fills", "in_background"), [(0, False), (1, False), (1, True)])
def test_a_disk_that_is_full_for_one_rank_is_told_by_all_and_the_last_checkpoint_stays(
    tmp_path: Path, fills: int, in_background: bool
) -> None:
    arguments = {"fills": fills, "in_background": in_background}
    told = run_on_ranks(_called, 2, save_on_this_rank, (tmp_path, [1, 2]), arguments)
    assert told[0] == told[1]
    assert f"{checkpoint_path(tmp_path, 2)} could not be written: File too large" in told[0]
    assert "It needs 0.1 MB" in told[0], "of both ranks"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def _called(
    function: Callable[..., str], arguments: tuple[object], named: dict[str, object]
) -> str:
    return function(*arguments, **named)


def find_on_this_rank(run_directory: Path) -> tuple[str, list[str]]:
    """(the checkpoint to go on from, what is told) or (an error, what is told)."""
    sink = Incidents()
    bus = Bus([sink] if dist.get_rank() == 0 else [])
    try:
        found = find_checkpoint(run_directory, recipe(run_directory), bus)
    except CheckpointError as error:
        return str(error), sink.told
    return "none" if found is None else found.name, sink.told


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": ("model-00001.safetensors", truncate, "model-00001.safetensors has 1"),
    "flipped": ("optimizer-00000.safetensors", flip_a_byte, "another sha256 than when"),
    "missing": ("optimizer-00001.safetensors", Path.unlink, "00001.safetensors is missing"),
    "unfinished": ("manifest.json", Path.unlink, "no manifest.json, so it was never finished"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_ranks_go_on_from_the_same_whole_checkpoint_and_tell_of_the_damaged_one(
    tmp_path: Path, damage: str
) -> None:
    run_on_ranks(save_on_this_rank, 2, tmp_path, [1, 2])
    name, harm, message = DAMAGES[damage]
    harm(checkpoint_path(tmp_path, 2) / name)
    found = run_on_ranks(find_on_this_rank, 3, tmp_path)
    assert [name for name, _ in found] == ["step-00000001"] * 3
    (told,) = found[0][1]
    assert message in told
    assert "Kept as damaged-step-00000002; going on from step-00000001" in told
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    flip_a_byte(checkpoint_path(tmp_path, 1) / "model-00000.safetensors")
    errors = [error for error, _ in run_on_ranks(find_on_this_rank, 2, tmp_path)]
    assert errors[0] == errors[1]
    assert "no checkpoint can be used, all 1 are damaged" in errors[0]
