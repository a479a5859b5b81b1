"""The saves of a run: one at a time, behind the steps that follow, each told once it is whole.

Owns when training waits for the disk and what is said of it. What is written is checkpoint's.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from herder.checkpoint.directory import step_of
from herder.checkpoint.run import CheckpointWriter, Progress, Save
from herder.checkpoint.verdict import UNJUDGED, Verdict
from herder.errors import CheckpointError
from herder.observe.events import Bus, CheckpointSaved, Incident, Notice
from herder.observe.meters import Stopwatch
from herder.parallel.mesh import storage_group
from herder.parallel.seat import note
from herder.train.state import TrainRun, state_tensors

_LEAVE_SECONDS = 60.0
"""How long a run that fails waits for the save that is under way."""


class Saver:
    """Saves the state of a run. All ranks call its methods together, but for `tell`."""

    def __init__(self, run: TrainRun, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self._group = storage_group(run.settings.parallel.mesh)
        self._writer: CheckpointWriter | None = None
        self._pending: Save | None = None
        self._stall_seconds = 0.0
        self._step: int | None = None
        self.newest: Path | None = None
        """The last full one of this process that is whole."""
        self._full_bytes = 0
        self._is_light = False

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way failed, which `wait` raises on all."""
        return self._pending is not None and self._pending.has_failed

    def save(
        self, progress: Progress, verdict: Verdict = UNJUDGED, *, is_light: bool = False
    ) -> None:
        """Save, unless this step is saved already; waits for the save before to end.

        is_light: only weights, as what changed since the last full one of this process; nothing
        where there is none yet.

        Returns when the state is copied, or when all is written: checkpoint.asynchronous. Raises
        CheckpointError when this one or the one before could not be written.
        """
        if self._step == progress.step:
            return
        run, settings, watch = self._run, self._run.config.checkpoint, Stopwatch()
        self._wait_for_disk(progress.step)
        base = self.newest if is_light else None
        if is_light and base is None:
            return
        note(progress.step, "saving a checkpoint")
        tensors = state_tensors(run.decoder, run.optimizer, has_copies=False)
        if self._writer is None:
            pins = run.settings.device.type == "cuda"
            self._writer = CheckpointWriter(tensors, self._group, pins=pins)
        self._pending = self._writer.save(
            run.run_directory,
            tensors,
            progress=progress,
            meta=run.meta.model_copy(update={"step": progress.step, "unix_seconds": time.time()}),
            model_files=run.model_files,
            policy=settings,
            verdict=verdict,
            in_background=settings.asynchronous,
            base=base,
        )
        self._is_light = is_light
        self._step = self._step if is_light else progress.step
        self._stall_seconds = watch.seconds()
        if not settings.asynchronous:
            self.wait()

    def _wait_for_disk(self, step: int) -> None:
        before, watch = self._pending, Stopwatch()
        is_busy = before is not None and not before.future.done()
        self.wait()
        if is_busy:
            told = f"step {step} waited {watch.seconds():.1f} s for {before.path.name}, which was "
            told += "still being written: a faster disk or a larger checkpoint.every_steps "
            told += f"({self._run.config.checkpoint.every_steps}) spares that"
            self._bus.emit(Notice(message=told))

    def tell(self) -> None:
        """Tell of the save under way if it is whole by now."""
        if self._pending is not None and self._pending.future.done() and not self.has_failed:
            self.wait()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when no save is under way. Raises CheckpointError when it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step = step_of(pending.path)
        note(step, "waiting for its checkpoint to be written")
        try:
            saved = pending.result(timeout_seconds)
        except CheckpointError as error:
            told = Incident(kind="checkpoint_not_saved", message=str(error), step=step)
            self._bus.emit(told)
            raise
        if not self._is_light:
            self.newest, self._full_bytes = saved.path, saved.num_bytes
        self._bus.emit(
            CheckpointSaved(
                step=step,
                path=str(saved.path),
                num_bytes=saved.num_bytes,
                seconds=saved.seconds,
                stall_seconds=self._stall_seconds,
                full_bytes=self._full_bytes if self._is_light else None,
            )
        )

    def close(self) -> None:
        """Give a save that is under way when the run fails the time to end."""
        with suppress(Exception):  # the run's own error is the one to be told
            self.wait(_LEAVE_SECONDS)
