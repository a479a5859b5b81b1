"""The tree names no package host: installing uses what a person's machine is set up with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
URL = re.compile(r"https?://([A-Za-z0-9.-]+\.[a-z]{2,}|\[)")
INDEX = re.compile(r"(extra-)?index-" + r"url")
READABLE = {"arxiv.org", "www.apache.org", "www.w3.org", "creativecommons.org"}
"""Hosts that are cited for a person to read and never contacted."""


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    return [path for name in listing.splitlines() if (path := REPOSITORY / name).is_file()]


def test_no_file_names_a_host_to_download_from() -> None:
    found = []
    for path in tracked_files():
        text = path.read_text(errors="ignore")
        hosts = {host for host in URL.findall(text) if host not in READABLE}
        if hosts or INDEX.search(text):
            found.append((str(path.relative_to(REPOSITORY)), sorted(hosts)))
    assert found == []


def test_no_big_file_is_committed() -> None:
    assert [path for path in tracked_files() if path.stat().st_size > 400_000] == []
