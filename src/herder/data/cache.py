"""The cache folder outside any project: where it is, and how something gets into it whole.

Owns `~/.cache/herder` (HERDER_CACHE overrides it). What is written there is written to a fresh
folder and renamed, under a lock, so that concurrent processes build a thing once and what exists is
whole. Everything in it can be deleted at any time and is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from herder.errors import ResourceError


def cache_folder() -> Path:
    """`$HERDER_CACHE`, else `~/.cache/herder`."""
    return Path(os.environ.get("HERDER_CACHE") or "~/.cache/herder").expanduser()


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """The folder `target`; where there is none yet, `build` fills a fresh one that becomes it.

    Other processes that want the same folder wait for the first one. Raises ResourceError where the
    cache cannot be written; an error of `build` leaves nothing behind.
    """
    if target.exists():
        return target
    fresh = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
                fresh.mkdir()
                try:
                    build(fresh)
                    fresh.rename(target)
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"The cache folder {cache_folder()} cannot be written: {error.strerror or error}. "
            "Free some space, or point HERDER_CACHE to another folder."
        ) from error
    return target
