"""`herder train` as a process with its ranks, watched and disturbed from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

HERDER = (sys.executable, "-c", "from herder.cli.main import main; main()")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
WAIT_SECONDS = 120.0


class Training:
    """One command in the run directory beside its recipe; what is left of it is killed."""

    def __init__(self, recipe: Path, *settings: str, launcher: Sequence[str] = HERDER) -> None:
        self.run_directory = recipe.parent / "run"
        words = [word for setting in settings for word in ("--set", setting)]
        self.process = psutil.Popen(
            [*launcher, "train", str(recipe), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            for each in [*self.process.children(recursive=True), self.process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.communicate()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All of one kind that the run's file has by now, in order."""
        path = self.run_directory / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in told if event["event"] == kind]

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Fails when the command ends before, and after a while."""
        until = time.monotonic() + WAIT_SECONDS
        while not is_so():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until, "it did not come to that"
            time.sleep(0.01)

    def wait_for_steps(self, count: int) -> None:
        """Until that many were done since the start of the run, repeated ones too."""
        self.wait_until(lambda: len(self.events("StepFinished")) >= count)

    def rank_processes(self) -> list[psutil.Process]:
        """Those of the ranks that are there now."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for each in self.process.children():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if "RANK" in each.environ():
                        found.append(each)
        return found

    def rank(self, index: int) -> psutil.Process:
        """The process of one rank."""
        (one,) = [p for p in self.rank_processes() if p.environ()["RANK"] == str(index)]
        return one

    def finish(self) -> tuple[str, str]:
        """(stdout, stderr) of the command, once it has ended."""
        out, err = self.process.communicate(timeout=2 * WAIT_SECONDS)
        return out, err
