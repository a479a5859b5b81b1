"""Saves behind the steps: one at a time, each step once, told when whole, never lost silently."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from herder.checkpoint.directory import list_checkpoints, step_of
from herder.config.run import CheckpointConfig, RunConfig
from herder.errors import CheckpointError
from herder.observe.events import Bus, CheckpointSaved, Event, Incident, Notice
from herder.train.saving import Saver
from herder.train.state import TrainRun
from tests.tiny import LLAMA_JSON, initialized, meta_at, progress_at, tiny_model, trainer


class Told:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events = list[Event]()

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        self.events.append(event)

    def close(self) -> None: ...

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class SlowDisk(dict[str, bytes]):
    """Files that are not written before they are let through."""

    def __init__(self) -> None:
        super().__init__({"config.json": b"{}"})
        self.lets_through = threading.Event()

    def items(self) -> Any:
        assert self.lets_through.wait(60)
        return super().items()


def tiny_run(run_directory: Path, files: Mapping[str, bytes], *, asynchronous: bool) -> TrainRun:
    model = tiny_model("d")
    parts = trainer(initialized(model))
    assert isinstance(parts.optimizer, torch.optim.AdamW)
    config = RunConfig.model_validate(
        {"model": {"config": LLAMA_JSON, "initialize": "random"}}
    ).model_copy(update={"checkpoint": CheckpointConfig(every_steps=7, asynchronous=asynchronous)})
    return TrainRun(
        config=config,
        run_directory=run_directory,
        decoder=parts.decoder,
        optimizer=parts.optimizer,
        micro_batches=lambda _step: [],
        held_out=list,
        corpus="c",
        step_tokens=1,
        settings=parts.settings,
        meta=meta_at(0, model.model_dump(mode="json")),
        model_files=files,
        flops_per_token=1.0,
        peak_flops_per_second=None,
        peak_source="none",
    )


def test_training_goes_on_until_the_next_save_which_waits_and_says_so(tmp_path: Path) -> None:
    disk, told = SlowDisk(), Told()
    saver = Saver(tiny_run(tmp_path, disk, asynchronous=True), Bus([told]))
    saver.save(progress_at(1))
    saver.tell()
    assert (told.events, saver.newest) == ([], None)
    threading.Timer(0.3, disk.lets_through.set).start()
    saver.save(progress_at(2))
    saver.wait()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1, 2]
    first, second = told.of(CheckpointSaved)
    assert (first.step, second.step) == (1, 2)
    assert first.stall_seconds < first.seconds
    assert second.stall_seconds >= 0.2, "the wait for the first one is in it"
    (notice,) = told.of(Notice)
    assert "step 2 waited" in notice.message
    assert "step-00000001, which was still being written" in notice.message
    assert "checkpoint.every_steps (7)" in notice.message
    assert saver.newest == list_checkpoints(tmp_path)[-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_is_saved_once(tmp_path: Path, asynchronous: bool) -> None:
    told = Told()
    saver = Saver(tiny_run(tmp_path, {}, asynchronous=asynchronous), Bus([told]))
    saver.save(progress_at(3))
    assert bool(told.events) != asynchronous
    saver.save(progress_at(3))
    saver.wait()
    (saved,) = told.events
    assert isinstance(saved, CheckpointSaved)
    assert saved.num_bytes > 10_000
    if not asynchronous:
        assert saved.stall_seconds is not None
        assert saved.stall_seconds >= saved.seconds


def test_a_save_that_failed_is_told_and_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    told = Told()
    saver = Saver(tiny_run(tmp_path, {"no/such/folder": b""}, asynchronous=True), Bus([told]))
    saver.save(progress_at(3))
    until = time.monotonic() + 60
    while not saver.has_failed and time.monotonic() < until:
        saver.tell()
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="could not be written: No such file"):
        saver.wait()
    (incident,) = told.events
    assert isinstance(incident, Incident)
    assert (incident.kind, incident.step) == ("checkpoint_not_saved", 3)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    saver.close()


def test_a_run_that_fails_gives_the_save_under_way_the_time_to_end(tmp_path: Path) -> None:
    disk, told = SlowDisk(), Told()
    saver = Saver(tiny_run(tmp_path, disk, asynchronous=True), Bus([told]))
    saver.save(progress_at(1))
    threading.Timer(0.2, disk.lets_through.set).start()
    saver.close()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1]
