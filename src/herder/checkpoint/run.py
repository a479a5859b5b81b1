"""Checkpoints of a run: everything a step depends on, saved whole or not at all, loaded in place.

A checkpoint folder is also a model folder: config.json, the tokenizer's files and the model's
tensors under our parameter names, whole or in the pieces that ranks had. Knows tensors by name
only: neither the loop nor how state is laid out.

    step-00000123/
        model.safetensors  optimizer.safetensors     tensors by name, of a run in one process
        model-00000.safetensors ...                  or what the first rank wrote of them, and so on
        train_state.json                             step, data position, random states, verdict
        experiment_meta.json                         config, its hash, plan, commit, versions
        config.json tokenizer.json ...               what makes it loadable as a model
        manifest.json                                sizes and sha256 of all of these, written last
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import JsonValue, NonNegativeInt, ValidationError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from herder.checkpoint.directory import (
    checkpoint_path,
    make_afresh,
    not_written,
    publish,
    unfinished_path,
)
from herder.checkpoint.inventory import keep_by
from herder.checkpoint.light import write_delta
from herder.checkpoint.manifest import FileEntry, verify_manifest, write_manifest
from herder.checkpoint.metadata import ExperimentMeta, differing_keys, read_meta, write_meta
from herder.checkpoint.random_state import capture_random_state, restore_random_state
from herder.checkpoint.sharded import (
    PlannedOnce,
    SafetensorsWriter,
    load_tensors,
    read_metadata,
    refuse_misfits,
)
from herder.checkpoint.source import DELTA, MODEL, OPTIMIZER
from herder.checkpoint.stream import write_tensors
from herder.checkpoint.verdict import TRAIN_STATE, UNJUDGED, Verdict
from herder.config.record import Record
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError, HerderError
from herder.families.weights import listed
from herder.observe.meters import Stopwatch
from herder.parallel.turns import first_rank_decides


class DataPosition(Record):
    """Where in the data the run is: batches are a pure function of corpus, seed and step."""

    corpus: str
    """The fingerprint of the tokenized documents."""
    seed: NonNegativeInt
    step: NonNegativeInt


class Progress(Record):
    """How far a run is. The next step to do is `step`, counted from 0."""

    step: NonNegativeInt
    tokens: NonNegativeInt
    """Tokens with a target that were learned from so far."""
    data: DataPosition
    schedule: dict[str, JsonValue]
    """The schedule that was followed; its value is a function of the step alone."""


class _TrainState(Record):
    progress: Progress
    verdict: Verdict = UNJUDGED
    random: dict[str, JsonValue]


@dataclass(frozen=True)
class TrainTensors:
    """The tensors of a run by name. They are live: loading copies into them."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    is_part: bool = False
    """Whether other pipeline stages hold tensors that are not named here."""

    @property
    def all(self) -> dict[str, Tensor]:
        """Both together."""
        return {**self.model, **self.optimizer}


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is whole and under its final name."""

    path: Path
    num_bytes: int
    seconds: float
    """From the start of the save, its copy included, until it had its name."""


@dataclass(frozen=True)
class Save:
    """One checkpoint that is being written, or was."""

    path: Path
    is_first_rank: bool
    num_bytes: int
    """Of the tensors."""
    future: Future[Metadata]

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows by now that it could not be written."""
        return self.future.done() and self.future.exception() is not None

    def result(self, timeout_seconds: float | None = None) -> SavedCheckpoint:
        """Wait until it is whole. A failure on one rank is raised on all of them.

        Raises CheckpointError when it could not be written (a full disk): nothing half-written
        stays. Raises TimeoutError where it takes longer.
        """
        try:
            return self.future.result(timeout_seconds).storage_data
        except CheckpointException as failure:
            if self.is_first_rank:
                shutil.rmtree(unfinished_path(self.path), ignore_errors=True)
            cause = min(failure.failures.items())[1][0]
            if isinstance(cause, HerderError):
                raise cause from failure
            if not isinstance(cause, OSError):
                raise RuntimeError(str(failure)) from cause
            advice = (
                "Earlier checkpoints are untouched. Make room or lower checkpoint.keep_last, then "
                "run the same command to go on from the newest one."
            )
            raise not_written(self.path, cause, num_bytes=self.num_bytes, advice=advice) from cause


class CheckpointWriter:
    """Saves of one run: each rank writes what it holds, and of what several hold its share."""

    def __init__(
        self, tensors: TrainTensors, group: dist.ProcessGroup | None = None, *, pins: bool = False
    ) -> None:
        """A collective of the group, which nothing else may use; None: this process is alone.

        Copies on the host are made into the same memory at every save. pins: whether a GPU writes
        to it directly.
        """
        self._group = group
        self._rank = None if group is None else dist.get_rank(group)
        self._planner = PlannedOnce(tensors.all, group)
        self._optimizer_names = frozenset(tensors.optimizer)
        options = StagingOptions(pins, False, False, pins)  # neither shared nor in a thread
        self._stager = DefaultStager(options)
        if group is None:  # which torch would remark at every save
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")

    def save(
        self,
        run_directory: Path,
        tensors: TrainTensors,
        *,
        progress: Progress,
        meta: ExperimentMeta,
        model_files: Mapping[str, bytes],
        policy: CheckpointConfig,
        verdict: Verdict = UNJUDGED,
        in_background: bool = False,
        base: Path | None = None,
    ) -> Save:
        """Write `checkpoints/step-<step>`, and delete what the policy lets go of before and after.

        base: a full checkpoint that this writer wrote; then `light-<step>` is written instead.

        Everything goes to a fresh folder that is renamed when complete. in_background: return once
        the state is copied to the host. The save before must have ended.
        """
        final = checkpoint_path(run_directory, progress.step, is_light=base is not None)
        fresh, watch = unfinished_path(final), Stopwatch()
        state = _TrainState(progress=progress, verdict=verdict, random=capture_random_state())

        def begin() -> None:
            # before, as more are there where it was lowered
            keep_by(run_directory, policy, spares=[base] if base else [])
            make_afresh(fresh)

        def finish(written: dict[str, FileEntry]) -> SavedCheckpoint:
            (fresh / TRAIN_STATE).write_text(state.model_dump_json() + "\n", encoding="utf-8")
            write_meta(meta, fresh)
            for name, content in model_files.items():
                (fresh / name).write_bytes(content)
            num_bytes = write_manifest(fresh, written, base=base)
            publish(fresh, final)
            keep_by(run_directory, policy, spares=[base or final])
            return SavedCheckpoint(final, num_bytes, watch.seconds())

        planner, file_of, write = self._planner, self._file_of, write_tensors
        if base is not None:
            planner = planner.without(self._optimizer_names)
            file_of, write = self._delta_of, partial(_write_light, base)
        arguments: dict[str, Any] = {
            "state_dict": planner.written_here(tensors.all),
            "storage_writer": SafetensorsWriter(fresh, file_of, begin, finish, write),
            "planner": planner,
            "process_group": self._group,
            "no_dist": self._group is None,
        }
        future: Any = Future()
        if in_background:
            future = dcp.async_save(**arguments, async_stager=self._stager)
        else:
            try:
                future.set_result(dcp.save(**arguments))
            except BaseException as error:
                future.set_exception(error)
        return Save(final, not self._rank, planner.num_bytes, future)

    def _file_of(self, name: str) -> str:
        """Which file of this rank a tensor is written to."""
        stem = OPTIMIZER if name in self._optimizer_names else MODEL
        rank = "" if self._rank is None else f"-{self._rank:05d}"
        return f"{stem}{rank}.safetensors"

    def _delta_of(self, name: str) -> str:
        return self._file_of(name).removesuffix(".safetensors") + DELTA


def _write_light(base: Path, path: Path, items: list[WriteItem], planner: SavePlanner) -> FileEntry:
    full = base / f"{path.name.removesuffix(DELTA)}.safetensors"
    return write_delta(path, items, planner, base=full)


def load_checkpoint(
    checkpoint: Path, tensors: TrainTensors, *, architecture: Mapping[str, Any]
) -> Progress:
    """Copy a checkpoint into live tensors, set the random states, and say where the run is.

    On several ranks all of them together, each copying what it holds; how the state was laid out
    when it was saved does not matter. Raises CheckpointError for a checkpoint of another
    architecture (with what differs), a damaged one, or one whose tensors are not exactly those
    asked for; then nothing was copied.
    """

    def read() -> tuple[_TrainState, Metadata]:
        refuse_other_architecture(checkpoint, architecture)
        verify_manifest(checkpoint, reads_contents=False)
        return _read_train_state(checkpoint), read_metadata(list(checkpoint.glob("*.safetensors")))

    state, stored = first_rank_decides(read)
    refuse_misfits(tensors.all, stored, where=checkpoint, is_part=tensors.is_part)
    load_tensors(tensors.all, stored)
    restore_random_state(state.random)
    return state.progress


def refuse_other_architecture(checkpoint: Path, architecture: Mapping[str, Any]) -> None:
    """Raise CheckpointError with what differs, if the checkpoint is of another architecture."""
    differing = differing_keys(read_meta(checkpoint).architecture, architecture)
    if differing:
        told = [f"{key}: {old!r} there, {new!r} here" for key, (old, new) in differing.items()]
        lines = listed(told, separator="\n  ")
        advice = "Train the model it was made for, or --set run_directory=runs/another."
        raise CheckpointError(f"{checkpoint} is of another architecture:\n  {lines}\n{advice}")


def _read_train_state(checkpoint: Path) -> _TrainState:
    path = checkpoint / TRAIN_STATE
    try:
        return _TrainState.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
