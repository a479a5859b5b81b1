"""Sinks: a log file that survives crashes, and lines that people can read."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

from herder.observe.events import (
    Bus,
    DeviceMemory,
    Incident,
    Notice,
    RouterStats,
    RunInterrupted,
    RunStarted,
    StepFinished,
)
from herder.observe.sinks import JsonLinesSink, LineSink, describe, describe_step, read_events

STEP = StepFinished(
    step=3,
    loss=2.5,
    gradient_norm=1.25,
    learning_rate=3e-4,
    tokens=60,
    seconds=0.5,
    tokens_per_second=1234.0,
    model_flops_utilization=0.375,
    peak_memory_bytes=1_500_000_000,
    seconds_left=65.0,
)


def test_every_line_is_on_disk_as_soon_as_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLinesSink(path)
    sink.receive(STEP, unix_seconds=1.0)
    assert list(read_events(path)) == [STEP]
    sink.close()


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for message in ("first", "second"):
        sink = JsonLinesSink(path)
        sink.receive(Notice(message=message), unix_seconds=1.0)
        sink.close()
    assert list(read_events(path)) == [Notice(message="first"), Notice(message="second")]


def test_a_line_torn_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "Notice", "unix_seconds": 1.0, "mess')
    sink = JsonLinesSink(path)
    sink.receive(Notice(message="after the crash"), unix_seconds=2.0)
    sink.close()
    assert list(read_events(path)) == [Notice(message="after the crash")]
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "after the crash"


def test_a_plain_log_has_one_line_an_event_with_the_numbers_people_ask_for() -> None:
    stream = io.StringIO()
    bus = Bus([LineSink(stream)])
    bus.emit(
        RunStarted(
            run_directory="runs/a",
            model="tiny",
            parameters=56_400_000,
            first_step=0,
            steps=120,
            step_tokens=2048,
            precision="bf16",
            device="cpu",
            num_threads=2,
            flops_per_token=252.4e6,
            peak_flops_per_second=404e9,
            peak_source="measured here",
            config_hash="abc",
            git_commit=None,
        )
    )
    bus.emit(STEP)
    bus.emit(Incident(kind="damaged_checkpoint", message="sha256 differs", step=2))
    start, step, incident = stream.getvalue().splitlines()
    assert "56.40M parameters, bf16 on cpu: 120 steps of 2,048 tokens" in start
    assert "404.00 GFLOP/s (measured here)" in start
    assert step.startswith("step   3/120  loss 2.5000  norm 1.250  lr 3.00e-04  1,234 tokens/s")
    assert "MFU 37.5%" in step
    assert "1 min 05 s left" in step
    assert incident == "incident at step 2: damaged_checkpoint: sha256 differs"


def test_a_stop_before_the_first_step_does_not_claim_that_anything_was_saved() -> None:
    told = [describe(RunInterrupted(step=step, signal="SIGINT"), steps=9) for step in (0, 3)]
    assert told[0] == "SIGINT: stopped after step 0 of 9, nothing to save yet"
    assert told[1] == "SIGINT: stopped after step 3 of 9, state saved"


def test_step_lines_keep_their_columns() -> None:
    assert describe_step(STEP, steps=1000).index("loss") == describe(STEP, steps=9999).index("loss")


def test_what_routers_did_stands_in_the_line_of_their_step() -> None:
    stream = io.StringIO()
    sink = LineSink(stream)
    balanced = RouterStats(
        step=3,
        layer=0,
        tokens=60,
        selections=(30, 30, 30, 30),
        imbalance=1.0,
        entropy=math.log(4),
        max_entropy=math.log(4),
        dead=(),
        dominant=(),
        dropped_tokens=0,
    )
    collapsed = replace(balanced, layer=1, imbalance=2.0, entropy=0.0, dead=(3,), dominant=(0, 1))
    for event in (balanced, collapsed, replace(STEP, aux_loss=3.5)):
        sink.receive(event, unix_seconds=1.0)
    (line,) = stream.getvalue().splitlines()
    assert "loss 2.5000  aux 3.500" in line
    assert line.endswith("imbalance 2.00 (layer 1)  entropy 50.0%  dead 1  dominant 2")


def test_the_memory_of_each_device_stands_in_the_line_of_its_step(tmp_path: Path) -> None:
    memory = DeviceMemory(step=3, peak_bytes=(2_500_000_000, 1_000_000_000))
    stream, log = io.StringIO(), JsonLinesSink(tmp_path / "events.jsonl")
    line_sink = LineSink(stream)
    for sink in (line_sink, log):
        sink.receive(memory, unix_seconds=1.0)
        sink.receive(STEP, unix_seconds=1.0)
    log.close()
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("devices 2.50 GB | 1.00 GB")
    assert list(read_events(tmp_path / "events.jsonl")) == [memory, STEP]
