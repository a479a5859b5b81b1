"""The checkpoints of a run as they lie there, and which of them a policy lets go of.

Owns what is kept and in which order the rest is deleted. Imports no torch, reads no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from herder.checkpoint.directory import (
    CHECKPOINTS,
    list_checkpoints,
    list_light,
    remove_checkpoint,
    step_of,
)
from herder.checkpoint.manifest import base_of, find_damage, num_bytes_of
from herder.checkpoint.metadata import META, read_meta
from herder.checkpoint.verdict import Verdict, read_verdict
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of a run."""

    path: Path
    step: int
    kind: Literal["full", "light"]
    num_bytes: int
    """Of what its manifest names; 0 where that cannot be read."""
    damage: tuple[str, ...]
    """What is wrong with its files."""
    verdict: Verdict
    base: str | None
    """The full checkpoint that a light one rests on."""

    @property
    def state(self) -> Literal["whole", "damaged", "tainted"]:
        if self.damage:
            return "damaged"
        return "tainted" if self.verdict.tainted else "whole"

    @property
    def unix_seconds(self) -> float | None:
        """When it was written; None where that cannot be read."""
        try:
            return read_meta(self.path).unix_seconds
        except CheckpointError:
            return None


def look_at(
    checkpoint: Path,
    *,
    reads_contents: bool = False,
    on_bytes: Callable[[int], None] = lambda _num_bytes: None,
) -> Entry:
    """One checkpoint. reads_contents: whether its files are read and their sha256 compared; then
    on_bytes hears of each part that was read."""
    damage = find_damage(checkpoint, reads_contents=reads_contents, on_bytes=on_bytes)
    base = base_of(checkpoint)
    return Entry(
        path=checkpoint,
        step=step_of(checkpoint),
        kind="full" if base is None else "light",
        num_bytes=num_bytes_of(checkpoint),
        damage=tuple(damage),
        verdict=read_verdict(checkpoint),
        base=None if base is None else base.name,
    )


def checkpoints_at(place: Path) -> list[Path]:
    """Those of a run directory, light ones too, oldest first, or the one checkpoint that it is.

    Raises CheckpointError where it is neither.
    """
    if (place / CHECKPOINTS).is_dir():
        return checkpoints_of(place)
    if not (place / META).is_file() or place.parent.name != CHECKPOINTS:
        raise CheckpointError(
            f"{place} is neither a run directory, which has {CHECKPOINTS}/, nor a checkpoint in "
            "one. Name a run_directory, or a folder step-... or light-... of its checkpoints."
        )
    return [place]


def superfluous(
    entries: Sequence[Entry], policy: CheckpointConfig, *, spares: Collection[Path] = ()
) -> list[Entry]:
    """Those that a policy lets go of, light ones first. The newest that is good always stays.

    Good is what is whole and not tainted; only that counts. Where nothing is good the newest
    keep_last stay, and the newest stays in any case. A light one is kept with a full one that is
    among the newest keep_last. spares: what has to stay besides.
    """
    full = [each for each in entries if each.kind == "full"]
    good = [each for each in full if each.state == "whole"]
    newest = (good or full)[-policy.keep_last :]
    every, best = policy.keep_every, policy.keep_best
    ranked = [each for each in good if each.verdict.held_out_loss is not None]
    ranked.sort(key=lambda each: (each.verdict.held_out_loss, -each.step))
    kept = {each.path for each in (*newest, *full[-1:], *ranked[:best])} | set(spares)
    kept |= {each.path for each in good if every is not None and each.step % every == 0}
    bases = {each.path.name for each in newest} | {path.name for path in spares}
    light = [each for each in entries if each.kind == "light"]
    needless = [each for each in light if each.damage or each.base not in bases]
    return needless + [each for each in full if each.path not in kept]


def keep_by(
    run_directory: Path, policy: CheckpointConfig, *, spares: Collection[Path] = ()
) -> list[Entry]:
    """Delete what a policy lets go of, and give it. Raises CheckpointError where that fails."""
    entries = [look_at(path) for path in checkpoints_of(run_directory)]
    doomed = superfluous(entries, policy, spares=spares)
    for each in doomed:
        remove_checkpoint(each.path)
    return doomed


def checkpoints_of(run_directory: Path) -> list[Path]:
    """All of a run, light ones too, oldest first."""
    return sorted([*list_checkpoints(run_directory), *list_light(run_directory)], key=step_of)
