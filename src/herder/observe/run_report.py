"""What a run directory tells of its run: where it stands, how it ended, whose fault a hang was."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from herder.errors import CheckpointError
from herder.observe import events
from herder.observe.hangs import Diagnosis, diagnose_hang
from herder.observe.sinks import EVENTS, describe, read_events
from herder.observe.trace import TRACES, TRACES_BEFORE, read_traces
from herder.units import format_seconds


@dataclass(kw_only=True)
class RunReport:
    """What `herder report` tells. Numbers are of the newest step that was told."""

    model: str = "no run began"
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float = 0.0
    checkpoint: str | None = None
    ended: Literal["finished", "interrupted", "failed"] | None = None
    """How the newest start did. None: it goes on, hangs or was killed."""
    last_event: str = "none"
    seconds_since_last_event: float
    collectives: Diagnosis | None
    collectives_before: Diagnosis | None
    """Of the start before, where that above is of the newest. None: they were not traced."""

    def lines(self) -> list[str]:
        """For people. The start before is told where something was wrong with it."""
        pace = ""
        if self.loss is not None:
            pace = f", loss {self.loss:.4f}, {self.tokens_per_second:,.0f} tokens/s"
        told = f"{self.last_event} ({format_seconds(self.seconds_since_last_event)} ago)"
        if self.ended is None:
            told = f"no end was told: it goes on, hangs or was killed. The last event: {told}"
        lines = [f"{self.model}: step {self.step} of {self.steps}{pace}"]
        lines += [f"newest checkpoint: {self.checkpoint or 'none'}", told]
        if self.collectives is None:
            lines.append(
                "collectives were not traced; --set observe.trace_collectives=true names the rank "
                "that hangs or was killed"
            )
        else:
            lines += self.collectives.lines()
        if self.collectives_before is not None and self.collectives_before.ranks:
            lines += ["The start before:", *self.collectives_before.lines()]
        return lines


def report_run(run_directory: Path) -> RunReport:
    """Of a run that has ended or goes on. Raises CheckpointError where there is none."""
    path = run_directory / EVENTS
    if not path.is_file():
        near = [str(each.parent) for each in sorted(run_directory.glob(f"*/{EVENTS}"))]
        advice = f"Runs in it: {', '.join(near[:8])}." if near else "`herder train` makes them."
        raise CheckpointError(f"{run_directory}: no run directory, it has no {EVENTS}. {advice}")
    now, before = (
        diagnose_hang(traces) if (traces := read_traces(run_directory / name)) else None
        for name in (TRACES, TRACES_BEFORE)
    )
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    report = RunReport(seconds_since_last_event=seconds, collectives=now, collectives_before=before)
    for event in read_events(path):
        match event:
            case events.RunStarted():
                report.model, report.step, report.ended = event.model, event.first_step, None
                report.steps = event.steps
            case events.StepFinished():
                report.step, report.loss, report.ended = event.step, event.loss, None
                report.tokens_per_second = event.tokens_per_second
            case events.CheckpointSaved(full_bytes=None) | events.CheckpointLoaded():
                report.checkpoint = event.path
            case events.RunFinished():
                report.ended = "finished"
            case events.RunInterrupted():
                report.ended = "interrupted"
            case events.Incident():
                report.ended = "failed"
        report.last_event = describe(event, steps=report.steps)
    return report
