"""Settings that are compared: a process each, told when to do a repetition, so that they take turns
and a machine that slows down slows all of them."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress


@dataclass
class Worker:
    """One setting: side and mode, its process and its measurements."""

    side: str
    mode: str
    process: subprocess.Popen
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_gb: float = 0.0
    was_too_slow: bool = False
    """Its warm-up alone took longer than all repetitions may, and is all there is of it."""

    @property
    def name(self) -> str:
        name = f"{self.side} {self.mode}" + (" experts" if self.mode.isdigit() else "")
        return f"{name}, first step" if self.was_too_slow else name

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.rates)

    def has_time(self, limit_seconds: float) -> bool:
        """Whether one more repetition, as long as the last, ends within the limit."""
        if self.was_too_slow:
            return False
        return not self.seconds or sum(self.seconds) + self.seconds[-1] <= limit_seconds

    def repeat(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self._count(self.read())

    def warm_up(self, limit_seconds: float) -> None:
        """Wait until it has done its first repetition, which counts only if it is the only one."""
        reply = self.read()
        self.was_too_slow = reply["seconds"] > limit_seconds
        if self.was_too_slow:
            self._count(reply)

    def _count(self, reply: dict) -> None:
        self.rates.append(reply["tokens"] / reply["seconds"])
        self.seconds.append(reply["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.peak_gb = self.read()["peak_gb"]
        self.process.wait()

    def read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: {self.name} died with exit status {self.process.wait()}")
        return json.loads(line)

    def ratio_to(self, other: Worker) -> float:
        """Of paired repetitions: a slow setting has fewer, paired with the other's first ones."""
        return statistics.median(
            ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=False)
        )


def start_worker(side: str, mode: str, command: Sequence[str]) -> Worker:
    """Start a setting."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return Worker(side, mode, process)


def take_turns(
    console: Console,
    title: str,
    settings: Sequence[tuple[str, str, Sequence[str]]],
    *,
    repeats: int,
    limit_seconds: float,
) -> list[Worker]:
    """Start all settings (side, mode, command) and repeat each in turn; none is left running."""
    workers = list[Worker]()
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(title, total=len(settings) * repeats)
            for side, mode, command in settings:
                progress.update(task, description=f"{title}: starting {side} {mode}")
                workers.append(start_worker(side, mode, command))
                workers[-1].warm_up(limit_seconds)
            for _ in range(repeats):
                for worker in workers:
                    progress.update(task, description=f"{title}: {worker.name}")
                    if worker.has_time(limit_seconds):
                        worker.repeat()
                    progress.advance(task)
        for worker in workers:
            worker.close()
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.terminate()
                worker.process.wait()
    return workers
