"""The manifest of a folder: which files it holds, how long they are and their sha256.

Written last, so a folder with a manifest was whole once; verifying tells whether it still is. Knows
nothing of what the files mean, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from herder.errors import CheckpointError

MANIFEST = "manifest.json"


FileEntry = dict[str, Any]
"""What a manifest says of one file: num_bytes and sha256."""


def write_manifest(folder: Path, known: Mapping[str, FileEntry] | None = None) -> int:
    """Describe all files of `folder` in its manifest; returns their bytes together.

    known: files that were hashed as they were written, and need not be read again.
    """
    files = {
        path.name: (known or {}).get(path.name)
        or {"num_bytes": path.stat().st_size, "sha256": _sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return sum(entry["num_bytes"] for entry in files.values())


def verify_manifest(folder: Path, *, reads_contents: bool = False) -> None:
    """Compare the files of `folder` with its manifest.

    Lengths are always compared; `reads_contents` compares sha256 too. Raises CheckpointError that
    names all files that are missing, cut short or changed.
    """
    refuse_damaged(folder, find_damage(folder, reads_contents=reads_contents))


def refuse_damaged(folder: Path, problems: Iterable[str]) -> None:
    """Raise CheckpointError with what find_damage found, if it did."""
    listed = "; ".join(dict.fromkeys(problems))
    if listed:
        raise CheckpointError(f"{folder} is damaged: {listed}.")


def find_damage(
    folder: Path, *, reads_contents: bool, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """What is wrong with the files of `folder`; empty for one that is as it was written.

    share: (index, count) of those who look at it together, each at some of the files.
    """
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        wanted = [(name, each["num_bytes"], each["sha256"]) for name, each in files.items()]
    except FileNotFoundError:
        return [f"it has no {MANIFEST}, so it was never finished"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read: {error!r}"]
    problems: list[str] = []
    for name, num_bytes, sha256 in wanted[share[0] :: share[1]]:
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != num_bytes:
            problems.append(f"{name} has {path.stat().st_size:,} bytes of {num_bytes:,}")
        elif reads_contents and _sha256_of(path) != sha256:
            problems.append(f"{name} has another sha256 than when it was written")
    return problems


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
