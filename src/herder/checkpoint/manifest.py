"""The manifest of a folder: which files it holds, how long they are and their sha256.

Written last, so a folder with a manifest was whole once; verifying tells whether it still is. Knows
nothing of what the files mean, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from herder.errors import CheckpointError

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> int:
    """Describe all files of `folder` in its manifest; returns their bytes together."""
    files: dict[str, Any] = {
        path.name: {"num_bytes": path.stat().st_size, "sha256": _sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return sum(entry["num_bytes"] for entry in files.values())


def verify_manifest(folder: Path, *, reads_contents: bool) -> None:
    """Compare the files of `folder` with its manifest.

    Lengths are always compared; `reads_contents` compares sha256 too. Raises CheckpointError that
    names all files that are missing, cut short or changed.
    """
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        wanted = {name: (each["num_bytes"], each["sha256"]) for name, each in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, so it was never finished.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error!r}") from None
    problems: list[str] = []
    for name, (num_bytes, sha256) in wanted.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != num_bytes:
            problems.append(f"{name} has {path.stat().st_size:,} bytes of {num_bytes:,}")
        elif reads_contents and _sha256_of(path) != sha256:
            problems.append(f"{name} has another sha256 than when it was written")
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}.")


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
