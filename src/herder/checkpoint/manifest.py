"""The manifest of a folder: which files it holds, how long they are and their sha256.

Written last, so a folder with a manifest was whole once; verifying tells whether it still is. Names
the folder beside it that a light checkpoint rests on. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from herder.errors import CheckpointError

MANIFEST = "manifest.json"
_BYTES_AT_ONCE = 1 << 24


FileEntry = dict[str, Any]
"""What a manifest says of one file: num_bytes and sha256."""


def write_manifest(
    folder: Path, known: Mapping[str, FileEntry] | None = None, *, base: Path | None = None
) -> int:
    """Describe all files of `folder` in its manifest; returns their bytes together.

    known: files that were hashed as they were written, and need not be read again. base: a folder
    beside it without which it is of no use.
    """
    files = {
        path.name: (known or {}).get(path.name)
        or {"num_bytes": path.stat().st_size, "sha256": _sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    content: dict[str, Any] = {"files": files}
    if base is not None:
        content["base"] = {"folder": base.name, "manifest_sha256": _sha256_of(base / MANIFEST)}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return sum(entry["num_bytes"] for entry in files.values())


def num_bytes_of(folder: Path) -> int:
    """Of all files that the manifest names; 0 where it cannot be read."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return sum(each["num_bytes"] for each in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def base_of(folder: Path) -> Path | None:
    """The folder that this one rests on, None where it stands alone or has no readable manifest."""
    try:
        return folder.parent / json.loads((folder / MANIFEST).read_bytes())["base"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    folder: Path,
    *,
    reads_contents: bool,
    share: tuple[int, int] = (0, 1),
    on_bytes: Callable[[int], None] = lambda _num_bytes: None,
) -> list[str]:
    """What is wrong with the files of `folder`, and with the folder that it rests on; empty for one
    that is as it was written.

    share: (index, count) of those who look at it together, each at some of the files. on_bytes
    hears how much was read, part by part.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        files, base = content["files"], content.get("base")
        wanted = [(name, each["num_bytes"], each["sha256"]) for name, each in files.items()]
        rests_on = (folder.parent / base["folder"], base["manifest_sha256"]) if base else None
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
        elif reads_contents and _sha256_of(path, on_bytes) != sha256:
            problems.append(f"{name} has another sha256 than when it was written")
    if rests_on is not None:
        whole, sha256 = rests_on
        if not (whole / MANIFEST).is_file():
            problems.append(f"it rests on {whole.name}, which is missing")
        elif _sha256_of(whole / MANIFEST) != sha256:
            problems.append(f"it rests on another {whole.name} than the one that is there")
        else:
            theirs = find_damage(
                whole, reads_contents=reads_contents, share=share, on_bytes=on_bytes
            )
            problems += [f"{whole.name}, which it rests on: {each}" for each in theirs]
    return problems


def _sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda _num_bytes: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
            on_bytes(len(part))
    return digest.hexdigest()
