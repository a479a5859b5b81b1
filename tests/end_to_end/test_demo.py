"""`make demo` as its reader meets it: the whole way, and a clear end when a step cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def demo(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The demo's script in a folder that has only the recipes."""
    (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "demo.py")],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_step_that_fails_ends_the_demo_with_its_command(tmp_path: Path) -> None:
    done = demo(tmp_path, HERDER_CACHE=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "The demo stopped" in done.stdout
    assert "herder data fetch" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.package_data
@pytest.mark.usefixtures("smollm2_gguf", "wikipedia_leads")
def test_the_demo_goes_from_plan_to_answer(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    made = {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
    assert {"design.md", "train", "perplexity_before.json", "perplexity_after.json"} <= made
