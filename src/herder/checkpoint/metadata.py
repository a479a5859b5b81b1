"""experiment_meta.json: what a run was made of, so that it can be told apart, resumed and repeated.

Owns the record, the hash of a config and the comparison of two configs. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, NonNegativeInt, ValidationError

from herder.config.architecture import ArchitectureConfig
from herder.config.record import Record
from herder.config.run import ModelConfig, RunConfig
from herder.errors import CheckpointError

META = "experiment_meta.json"
FORMAT_VERSION = 1

MAY_CHANGE = (
    "run_directory",
    "cluster",
    "layout",
    "train.steps",
    "train.compile",
    "train.recompute",
    "train.loss_chunk_tokens",
    "train.collective_timeout_seconds",
    "checkpoint",
    "restart",
    "observe",
    "evaluate",
    "serve",
)
"""Config paths that a resumed run may set anew: none of them changes what is learned from what,
beyond rounding. train.steps does move a schedule that ends with the run, and the run says so."""


class ExperimentMeta(Record):
    """What a run was made of. Plain JSON inside, so that later versions can read older runs."""

    format_version: int = FORMAT_VERSION
    model: str
    """What the recipe called it."""
    family: str
    architecture: dict[str, JsonValue]
    """An ArchitectureConfig."""
    config: dict[str, JsonValue]
    """The RunConfig as it ran: defaults and planned values filled in. train.seed is that of the
    weights, of the order of data and of routers' noise."""
    config_hash: str
    """Of everything in config but MAY_CHANGE."""
    plan: dict[str, JsonValue]
    corpus: str | None = None
    """The fingerprint of the documents it trains on."""
    git_commit: str | None
    """Of the source herder ran from, `+changes` and a hash of these added where files differed."""
    versions: dict[str, str]
    """Of packages by name, and of CUDA, cuDNN and NCCL where they are used."""
    hardware: dict[str, JsonValue] = Field(default_factory=dict)
    """What describe_host says of the first rank's machine, num_nodes and num_ranks."""
    step: NonNegativeInt
    unix_seconds: float


def write_meta(meta: ExperimentMeta, folder: Path) -> None:
    """Write experiment_meta.json into `folder`, whole or not at all."""
    target = folder / META
    fresh = target.with_name(f".writing-{META}")
    fresh.write_text(meta.model_dump_json(indent=1) + "\n", encoding="utf-8")
    fresh.rename(target)


def read_meta(folder: Path) -> ExperimentMeta:
    """The experiment_meta.json of a run directory or checkpoint. Raises CheckpointError.

    Fields of architecture and config that are younger than the file have their defaults; keys of
    the file that are younger than this herder are passed over.
    """
    path = folder / META
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {META}, so this is no run or checkpoint.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version={version}, this herder reads {FORMAT_VERSION}. "
            "Use the herder that wrote it."
        )
    known = {name: value for name, value in fields.items() if name in ExperimentMeta.model_fields}
    try:
        meta = ExperimentMeta.model_validate(known)
    except ValidationError as error:
        raise CheckpointError(f"{path}: not an {META} of ours: {error}") from None
    records = {"architecture": ArchitectureConfig, "config": RunConfig}
    filled = {name: _with_defaults(record, known[name]) for name, record in records.items()}
    return meta.model_copy(update=filled)


def _with_defaults(record: type[Record], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an older version saved with the fields that are new since then; as it is where it holds
    a field that is gone."""
    try:
        return record.model_validate_json(json.dumps(saved)).model_dump(mode="json")
    except ValidationError:
        return saved


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 over all values but defaults and those of MAY_CHANGE, by path.

    So neither the order of keys matters nor whether one existed yet.
    """
    fixed = {
        path: value
        for path, value in _flat(config)
        if not _may_change(path) and (path not in _defaults() or value != _defaults()[path])
    }
    text = json.dumps(fixed, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differing_keys(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[JsonValue, JsonValue]]:
    """Paths whose values differ, each with the old and the new one; an absent one is None."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }


def refuse_other_config(saved: ExperimentMeta, config: Mapping[str, Any], *, where: Path) -> None:
    """Raise CheckpointError if the run was made with values that a resumed run may not change."""
    differing = differing_keys(saved.config, config)
    fixed = {path: pair for path, pair in differing.items() if not _may_change(path)}
    if not fixed:
        return
    lines = [f"  {path}: {old!r} there, {new!r} now" for path, (old, new) in fixed.items()]
    if any(path not in _defaults() and not path.startswith("model.") for path in fixed):
        commit = f" at commit {saved.git_commit}" if saved.git_commit else ""
        lines.append(f"Not all of these are keys of this herder: go on with the one{commit}.")
    raise CheckpointError(
        f"{where} holds a run of another config:\n" + "\n".join(lines) + "\n"
        "Resuming would mix the two. Set these back, or --set run_directory=runs/another. "
        f"Free to change: {', '.join(MAY_CHANGE)}."
    )


def source_commit() -> str | None:
    """The git commit herder's own source is at; None outside of git.

    `+changes.` and a hash of these is added if tracked files differ.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changed = _git(here.parents[1], "diff", "HEAD", "--", ".")
    if not commit or not changed:
        return commit
    return f"{commit}+changes.{hashlib.sha256(changed.encode()).hexdigest()[:8]}"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def _defaults() -> dict[str, Any]:
    """Of every path of a config."""
    config = RunConfig.model_construct(model=ModelConfig.model_construct())
    return dict(_flat(config.model_dump(mode="json")))


def _may_change(path: str) -> bool:
    return any(path == free or path.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value
