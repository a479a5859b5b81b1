"""Checkpoints of a run: everything a step depends on, saved whole or not at all, loaded in place.

A checkpoint folder is also a model folder: config.json, the tokenizer's files and model.safetensors
under our parameter names. Knows tensors by name only: neither the loop nor how state is sharded.

    step-00000123/
        model.safetensors  optimizer.safetensors     tensors by name
        train_state.json                             step, data position, schedule, random states
        experiment_meta.json                         config, its hash, plan, commit, versions
        config.json tokenizer.json ...               what makes it loadable as a model
        manifest.json                                sizes and sha256 of all of these, written last
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from herder.checkpoint.directory import checkpoint_path, keep_newest, writing
from herder.checkpoint.manifest import verify_manifest, write_manifest
from herder.checkpoint.metadata import ExperimentMeta, differing_keys, read_meta, write_meta
from herder.checkpoint.random_state import capture_random_state, restore_random_state
from herder.checkpoint.stream import TensorSource, held_here, write_tensors
from herder.config.record import Record
from herder.errors import CheckpointError
from herder.families.weights import listed
from herder.model.build import copy_whole

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
TRAIN_STATE = "train_state.json"


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
    random: dict[str, JsonValue]


@dataclass(frozen=True)
class TrainTensors:
    """The tensors of a run by name. They are live: loading copies into them."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    is_part: bool = False
    """Whether other pipeline stages hold tensors that are not named here."""


@dataclass(frozen=True)
class TrainSources:
    """What a checkpoint is written from: all tensors of a run, whole, one at a time."""

    model: TensorSource
    optimizer: TensorSource

    @property
    def files(self) -> dict[str, TensorSource]:
        """By the file that each is written to."""
        return {MODEL: self.model, OPTIMIZER: self.optimizer}

    def read_along(self) -> None:
        """Take part in a save that another rank writes."""
        for source in self.files.values():
            for name in source.shapes:
                source.read(name)


def whole_sources(tensors: TrainTensors) -> TrainSources:
    """Of tensors that this process has whole."""
    return TrainSources(held_here(tensors.model), held_here(tensors.optimizer))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is whole and under its final name."""

    path: Path
    num_bytes: int


def save_checkpoint(
    run_directory: Path,
    sources: TrainSources,
    *,
    progress: Progress,
    meta: ExperimentMeta,
    model_files: Mapping[str, bytes],
    keep_last: int,
) -> SavedCheckpoint:
    """Write `checkpoints/step-<step>`, and delete all but the newest `keep_last` before and after.

    Everything goes to a fresh folder that is renamed when complete. Raises CheckpointError when it
    cannot be written (a full disk): nothing half-written stays, earlier checkpoints are untouched.
    """
    final = checkpoint_path(run_directory, progress.step)
    needed = sum(source.num_bytes for source in sources.files.values())
    advice = (
        "Earlier checkpoints are untouched. Make room or lower checkpoint.keep_last, then run the "
        "same command to go on from the newest one."
    )
    keep_newest(run_directory, keep_last=keep_last)  # more are there where it was lowered
    with writing(final, num_bytes=needed, advice=advice) as folder:
        for name, source in sources.files.items():
            write_tensors(folder / name, source)
        state = _TrainState(progress=progress, random=capture_random_state())
        (folder / TRAIN_STATE).write_text(state.model_dump_json() + "\n", encoding="utf-8")
        write_meta(meta, folder)
        for name, content in model_files.items():
            (folder / name).write_bytes(content)
        num_bytes = write_manifest(folder)
    keep_newest(run_directory, keep_last=keep_last)
    return SavedCheckpoint(final, num_bytes)


def load_checkpoint(
    checkpoint: Path,
    tensors: TrainTensors,
    *,
    architecture: Mapping[str, Any],
    place: Callable[[Tensor, Tensor], None] = copy_whole,
) -> Progress:
    """Copy a checkpoint into live tensors, set the random states, and say where the run is.

    place(live, whole): puts a stored tensor where it is held.
    Raises CheckpointError for a checkpoint of another architecture (with what differs), a damaged
    one, or one whose tensors are not exactly those asked for; then nothing was copied.
    """
    refuse_other_architecture(checkpoint, architecture)
    verify_manifest(checkpoint, reads_contents=False)
    state = _read_train_state(checkpoint)
    wanted = {MODEL: tensors.model, OPTIMIZER: tensors.optimizer}
    problems = [
        problem
        for name, live in wanted.items()
        for problem in _misfits(checkpoint / name, live, is_part=tensors.is_part)
    ]
    if problems:
        lines = listed(problems, separator="\n  ")
        raise CheckpointError(f"{checkpoint} does not fit this model:\n  {lines}")
    for name, live in wanted.items():
        _copy_into(live, checkpoint / name, place)
    restore_random_state(state.random)
    return state.progress


def refuse_other_architecture(checkpoint: Path, architecture: Mapping[str, Any]) -> None:
    """Raise CheckpointError with what differs, if the checkpoint is of another architecture."""
    differing = differing_keys(read_meta(checkpoint).architecture, architecture)
    if differing:
        told = [f"{key}: {old!r} there, {new!r} here" for key, (old, new) in differing.items()]
        lines = listed(told, separator="\n  ")
        raise CheckpointError(f"{checkpoint} is of another architecture:\n  {lines}")


def _read_train_state(checkpoint: Path) -> _TrainState:
    path = checkpoint / TRAIN_STATE
    try:
        return _TrainState.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _misfits(path: Path, live: Mapping[str, Tensor], *, is_part: bool) -> list[str]:
    """Names, shapes and dtypes in which a file and the live tensors differ."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            stored = {name: file.get_slice(name) for name in names}
            problems = [f"{path.name}: {name} is missing" for name in live.keys() - stored.keys()]
            extra = set() if is_part else stored.keys() - live.keys()
            problems += [f"{path.name}: {name} is extra" for name in extra]
            for name in live.keys() & stored.keys():
                shape, wanted = tuple(stored[name].get_shape()), tuple(live[name].shape)
                if shape != wanted:
                    problems.append(f"{path.name}: {name} is {shape}, wanted {wanted}")
            return sorted(problems)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


@torch.no_grad()
def _copy_into(
    live: Mapping[str, Tensor], path: Path, place: Callable[[Tensor, Tensor], None]
) -> None:
    """One tensor at a time, so that no second copy of the state is ever in memory."""
    with safe_open(path, framework="pt") as file:
        for name, tensor in live.items():
            place(tensor, file.get_tensor(name))
