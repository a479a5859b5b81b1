"""A run directory: where its checkpoints lie, which is the newest good one, how they come and go.

    run_directory/
        config.yaml plan.json experiment_meta.json events.jsonl
        checkpoints/step-00000123/      whole, or it does not have this name
        checkpoints/light-00000130/     weights only, as what changed since a full one

Nothing points at the newest checkpoint: it is found, so no pointer can be wrong. Imports no torch,
so that a run directory can be resolved and listed at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from herder.checkpoint.manifest import verify_manifest
from herder.checkpoint.verdict import read_verdict
from herder.errors import CheckpointError
from herder.units import format_gb

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"(step|light)-(\d{8,})")
_UNFINISHED = (".writing-", ".deleting-")


def checkpoint_path(run_directory: Path, step: int, *, is_light: bool = False) -> Path:
    """Where the checkpoint after `step` steps lies once it is whole."""
    return run_directory / CHECKPOINTS / f"{'light' if is_light else 'step'}-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """How many steps were done when it was written; from its name alone."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match, f"not a checkpoint's name: {checkpoint}"
    return int(match.group(2))


def list_checkpoints(run_directory: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest first. Some may be damaged (newest_checkpoint)."""
    return _named(run_directory, "step")


def list_light(run_directory: Path) -> list[Path]:
    """The same of light checkpoints, which hold weights only."""
    return _named(run_directory, "light")


def _named(run_directory: Path, kind: str) -> list[Path]:
    folder = run_directory / CHECKPOINTS
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [path for path, name in matches if name and name.group(1) == kind and path.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(
    run_directory: Path,
    *,
    verify: Callable[[Path], None] = verify_manifest,
    on_passed_over: Callable[[Path, str], None] = lambda _path, _why: None,
    candidates: Sequence[tuple[Path, str | None]] | None = None,
) -> Path | None:
    """The newest checkpoint that is not tainted and that `verify` raises no CheckpointError for, or
    None if there is none at all.

    on_passed_over hears of newer ones and what is wrong with them. candidates: the checkpoints,
    oldest first, and why they are tainted, where they are looked up already. Raises CheckpointError
    if there are checkpoints and none can be used: starting anew in silence would lose a run.
    """
    every = tainted_or_not(run_directory) if candidates is None else candidates
    problems = list[str]()
    for path, tainted in reversed(every):
        try:
            if tainted is None:
                verify(path)
                return path
            problem = f"{path} is tainted: {tainted}"
        except CheckpointError as error:
            problem = str(error)
        problems.append(problem)
        on_passed_over(path, problem)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        what = "damaged" if all(tainted is None for _, tainted in every) else "damaged or tainted"
        raise CheckpointError(
            f"{run_directory}: no checkpoint can be used, all {len(problems)} are {what}:\n"
            f"{lines}\nTo start anew, move {run_directory / CHECKPOINTS} away. A tainted one is "
            "whole and can be named: evaluate it, or start a run from it with model.source."
        )
    return None


def tainted_or_not(run_directory: Path) -> list[tuple[Path, str | None]]:
    """The full checkpoints, oldest first, each with why it is tainted or None."""
    return [(path, read_verdict(path).tainted) for path in list_checkpoints(run_directory)]


def remove_checkpoint(path: Path) -> None:
    """Delete one checkpoint in such an order that a crash leaves no half one under its name.

    Raises CheckpointError where it cannot be deleted.
    """
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be deleted ({error.strerror or error}). Nothing that is to be kept was "
            "touched. Delete it by hand, or raise checkpoint.keep_last."
        ) from error


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is no longer one, and keep it for a person to look at.

    Otherwise it would be tried at every start, and counted as one of those to keep.
    """
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


@contextmanager
def writing(final: Path, *, num_bytes: int) -> Generator[Path]:
    """A fresh folder beside `final` to fill, renamed to it once all of it is on the disk.

    num_bytes: what is about to be written, for the message. Raises CheckpointError when it cannot
    be written (a full disk): then nothing of it is left.
    """
    fresh = unfinished_path(final)
    try:
        try:
            make_afresh(fresh)
            yield fresh
            publish(fresh, final)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise not_written(final, error, num_bytes=num_bytes) from error


def unfinished_path(final: Path) -> Path:
    """Where a folder is filled before it gets its name; left there by a process that is killed."""
    return final.with_name(f".writing-{final.name}")


def make_afresh(folder: Path) -> None:
    """An empty folder, whatever was there before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(fresh: Path, final: Path) -> None:
    """Give a folder that is filled its name, once all of it is on the disk.

    A checkpoint of that name is replaced.
    """
    for path in (*fresh.iterdir(), fresh):
        _force_to_disk(path)
    if _NAME.fullmatch(final.name) and final.exists():
        remove_checkpoint(final)
    fresh.rename(final)
    _force_to_disk(final.parent)


def not_written(
    final: Path, error: Exception, *, num_bytes: int, advice: str = ""
) -> CheckpointError:
    """The error of a folder that could not be written, with what it needs and what is free."""
    existing = next(parent for parent in final.absolute().parents if parent.exists())
    free = format_gb(shutil.disk_usage(existing).free)
    reason = getattr(error, "strerror", None) or error
    told = f"{final} could not be written: {reason}. It needs {format_gb(num_bytes)}, "
    told += f"free: {free}. Nothing half-written was left. {advice}"
    return CheckpointError(told.rstrip())


def _force_to_disk(path: Path) -> None:
    """Wait until the file or folder is on the device, so that the rename cannot overtake it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(run_directory: Path) -> None:
    """Delete what a killed process left half written or half deleted. Hold the lock."""
    folder = run_directory / CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(run_directory: Path) -> Generator[None]:
    """Hold the run directory for this process; the system lets go when the process ends.

    Raises CheckpointError when another process trains there, and when the folder, or what is put
    into it while it is held, cannot be written.
    """
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        with (run_directory / ".lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                owner = lock.read(32).strip() or "unknown"
                raise CheckpointError(
                    f"run_directory: another process (id {owner}) is training in {run_directory}. "
                    "Stop it, or give this run --set run_directory=runs/another."
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield
    except OSError as error:
        if error.filename and not str(error.filename).startswith(str(run_directory)):
            raise
        raise CheckpointError(f"run_directory: {run_directory} cannot be used: {error}.") from error
