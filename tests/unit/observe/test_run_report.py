"""What is told of a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from herder.errors import CheckpointError
from herder.observe.events import (
    CheckpointSaved,
    Event,
    Incident,
    Notice,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StepFinished,
    to_json,
)
from herder.observe.run_report import RunReport, report_run
from herder.observe.trace import TRACES, TRACES_BEFORE, Head, Note, Report, TraceFile

STARTED = RunStarted(
    run_directory="runs/a",
    model="tiny",
    parameters=1_234_567,
    first_step=0,
    steps=10,
    step_tokens=64,
    precision="fp32",
    device="cpu",
    num_threads=1,
    flops_per_token=1e6,
    peak_flops_per_second=None,
    peak_source="unknown",
    config_hash="abc",
    git_commit=None,
)
STEP = StepFinished(
    step=4,
    loss=2.5,
    gradient_norm=1.25,
    learning_rate=3e-4,
    tokens=60,
    seconds=0.5,
    tokens_per_second=1234.0,
    model_flops_utilization=None,
    peak_memory_bytes=1_500_000_000,
    seconds_left=65.0,
)
SAVED = CheckpointSaved(step=4, path="runs/a/checkpoints/step-00000004", num_bytes=9, seconds=1.0)
FINISHED = RunFinished(
    step=10,
    loss=2.0,
    seconds=9.0,
    tokens=640,
    tokens_per_second=70.0,
    model_flops_utilization=None,
)


def report(folder: Path, *events: Event) -> RunReport:
    """Of a run that told these."""
    lines = [to_json(event, unix_seconds=1.0) + "\n" for event in events]
    (folder / "events.jsonl").write_text("".join(lines))
    return report_run(folder)


def trace(folder: Path, ended: Report | None) -> None:
    """Two ranks, of which the first has ended."""
    for rank in (0, 1):
        file = TraceFile(folder, Head(rank=rank, num_ranks=2, place=f"dp {rank}"))
        file.write(ended if ended and rank == 0 else Note(1.0, 4, "update"))
        file.close()


def test_a_run_that_told_no_end_stands_where_it_was_last(tmp_path: Path) -> None:
    run = report(tmp_path, STARTED, STEP, SAVED)
    assert (run.model, run.step, run.steps, run.ended) == ("tiny", 4, 10, None)
    assert (run.loss, run.tokens_per_second, run.checkpoint) == (2.5, 1234.0, SAVED.path)
    lines = run.lines()
    assert lines[0] == "tiny: step 4 of 10, loss 2.5000, 1,234 tokens/s"
    assert lines[1] == f"newest checkpoint: {SAVED.path}"
    assert lines[2].startswith("no end was told: it goes on, hangs or was killed. The last event: ")
    assert "--set observe.trace_collectives=true" in lines[3]


@pytest.mark.parametrize(
    ("events", "ended", "told"),
    [
        ([FINISHED], "finished", "finished 10 steps"),
        (
            [RunInterrupted(step=4, signal="SIGTERM")],
            "interrupted",
            "SIGTERM: stopped after step 4",
        ),
        ([Incident(kind="non_finite_step", message="x", step=5)], "failed", "incident at step 5"),
        ([Incident(kind="damaged_checkpoint", message="x"), STARTED], None, "no end was told"),
        ([FINISHED, Notice(message="nothing is left to do")], "finished", "note: nothing is left"),
        ([FINISHED, STARTED], None, "no end was told"),
    ],
)
def test_how_the_newest_start_ended_is_told(
    tmp_path: Path, events: list[Event], ended: str | None, told: str
) -> None:
    found = report(tmp_path, STARTED, STEP, *events)
    assert found.ended == ended
    assert found.lines()[2].startswith(told)


def test_a_run_before_its_first_event_is_told_as_one(tmp_path: Path) -> None:
    assert report(tmp_path).lines()[0] == "no run began: step 0 of 0"


def test_collectives_of_this_start_and_of_the_one_before_are_told(tmp_path: Path) -> None:
    gone = Report(2.0, "collective", 1, "all_reduce", "all_reduce failed")
    trace(tmp_path / TRACES_BEFORE, gone)
    found = report(tmp_path, STARTED)
    assert found.collectives is None
    assert found.collectives_before is not None
    assert found.collectives_before.ranks == [1]
    before = found.lines()[-4:]
    assert before[0] == "The start before:"
    assert before[1].startswith("rank 1 (dp 1) is hung or gone")
    trace(tmp_path / TRACES, None)
    now = report(tmp_path, STARTED).collectives
    assert now is not None
    assert (now.cause, now.ranks) == ("none", [])


def test_what_is_no_run_directory_is_refused_with_runs_nearby(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no events.jsonl. `herder train` makes them"):
        report_run(tmp_path / "none")
    (tmp_path / "debug").mkdir()
    report(tmp_path / "debug", STARTED)
    with pytest.raises(CheckpointError, match=f"Runs in it: {tmp_path / 'debug'}."):
        report_run(tmp_path)
