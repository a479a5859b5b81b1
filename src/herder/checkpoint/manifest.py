"""The manifest of a folder: which files it holds, how long they are and their sha256.

Written last, so a folder with a manifest was whole once; verifying tells whether it still is. Knows
nothing of what the files mean, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import NonNegativeInt, ValidationError

from herder.config.record import Record
from herder.errors import CheckpointError

MANIFEST = "manifest.json"


class FileEntry(Record):
    """One file as it was written."""

    num_bytes: NonNegativeInt
    sha256: str


class Manifest(Record):
    """All files of a folder but the manifest itself, by name."""

    files: dict[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(entry.num_bytes for entry in self.files.values())


def write_manifest(folder: Path) -> Manifest:
    """Describe all files of `folder` in its manifest."""
    entries = dict[str, FileEntry]()
    for path in sorted(folder.iterdir()):
        entries[path.name] = FileEntry(num_bytes=path.stat().st_size, sha256=sha256_of(path))
    manifest = Manifest(files=entries)
    target = folder / MANIFEST
    target.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return manifest


def verify_manifest(folder: Path, *, reads_contents: bool) -> Manifest:
    """The manifest of `folder`, after comparing it with the files.

    Lengths are always compared; `reads_contents` compares sha256 too. Raises CheckpointError that
    names all files that are missing, cut short or changed.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so it was never finished.") from None
    except (ValidationError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error}") from None
    problems = [
        problem
        for name, entry in manifest.files.items()
        if (problem := _problem(folder / name, entry, reads_contents=reads_contents))
    ]
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}.")
    return manifest


def sha256_of(path: Path) -> str:
    """The file's sha256 in hexadecimal, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(path: Path, entry: FileEntry, *, reads_contents: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != entry.num_bytes:
        return f"{path.name} has {size:,} bytes of {entry.num_bytes:,}"
    if reads_contents and sha256_of(path) != entry.sha256:
        return f"{path.name} has another sha256 than when it was written"
    return None
