"""The live display: fits 80 columns, shows what matters, and is only drawn on a terminal."""

import io
import re

import pytest
from rich.cells import cell_len

from herder.observe.console import LiveConsole, progress_sinks, sparkline
from herder.observe.events import (
    Bus,
    CheckpointSaved,
    EvaluationFinished,
    Notice,
    RouterStats,
    RunStarted,
    StepFinished,
)
from herder.observe.sinks import LineSink

STARTED = RunStarted(
    run_directory="runs/a",
    model="smollm2-135m-instruct",
    parameters=134_515_008,
    first_step=0,
    steps=12_000,
    step_tokens=2048,
    precision="bf16",
    device="cpu, 2 threads",
    num_threads=2,
    flops_per_token=8e8,
    peak_flops_per_second=4e11,
    peak_source="measured here",
    config_hash="abc",
    git_commit=None,
)


def step_finished(step: int) -> StepFinished:
    return StepFinished(
        step=step,
        loss=12.0 - step / 2000,
        gradient_norm=101.25,
        learning_rate=3e-4,
        tokens=2000,
        seconds=0.5,
        tokens_per_second=123_456.0,
        model_flops_utilization=0.375,
        peak_memory_bytes=139_500_000_000,
        seconds_left=48 * 3600.0,
    )


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    bus = Bus([LiveConsole(stream)])
    bus.emit(STARTED)
    for step in range(1, 12_001, 500):
        bus.emit(step_finished(step))
    bus.emit(Notice(message="an adjustment"))
    saved = CheckpointSaved(step=11_000, path="x" * 99, num_bytes=2_000_000_000, seconds=3.2)
    bus.emit(saved)
    bus.emit(
        RouterStats(
            step=11_501,
            layer=47,
            tokens=3000,
            selections=tuple(range(0, 160, 10)),
            imbalance=2.0,
            entropy=2.5,
            max_entropy=2.7725887,
            dead=(0,),
            dominant=(15,),
            dropped_tokens=0,
        )
    )
    bus.emit(EvaluationFinished(step=11_000, loss=3.0, perplexity=20.0, tokens=65_536, seconds=9.0))
    bus.close()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")


def test_the_display_shows_what_a_person_watches_a_run_for(drawn: str) -> None:
    last = drawn[drawn.rindex("smollm2-135m-instruct") :]
    for shown in ("11501/12000", "6.2495", "gradient norm 101.250", "123,456 tokens/s", "37.5%"):
        assert shown in last
    for shown in ("48 h 00 min left", "2.0 days left"):
        if shown in last:
            break
    else:
        pytest.fail(f"no time left in {last}")
    for shown in ("139.5 GB", "perplexity 20.00", "step 11000   2.00 GB in 3.2 s", "▁"):
        assert shown in last


def test_the_display_shows_the_worst_router_and_how_its_experts_are_used(drawn: str) -> None:
    last = drawn[drawn.rindex("smollm2-135m-instruct") :]
    assert "imbalance 2.00 (layer 47)  entropy 90.2%  dead 1  dominant 1" in last
    assert "layer 47  ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██" in last


def test_the_display_fits_80_columns(drawn: str) -> None:
    assert max(map(cell_len, drawn.splitlines())) <= 80


def test_before_the_first_step_no_time_left_is_told() -> None:
    stream = Terminal()
    bus = Bus([LiveConsole(stream)])
    bus.emit(STARTED)
    bus.close()
    assert "first step" in stream.getvalue()
    assert "left" not in stream.getvalue()


def test_notices_scroll_by_above_the_display(drawn: str) -> None:
    assert "note: an adjustment" in drawn


def test_without_a_terminal_auto_means_plain_lines() -> None:
    assert isinstance(progress_sinks("auto", io.StringIO())[0], LineSink)
    assert isinstance(progress_sinks("auto", Terminal())[0], LiveConsole)
    assert isinstance(progress_sinks("plain", Terminal())[0], LineSink)
    assert progress_sinks("none", Terminal()) == []


def test_a_sparkline_falls_as_its_values_fall_and_is_no_wider_than_asked() -> None:
    assert sparkline([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], columns=8) == "█▇▆▅▄▃▂▁"
    assert len(sparkline([float(i) for i in range(1000)], columns=30)) == 30
    assert sparkline([2.0, 2.0], columns=5) == "▁▁"
    assert sparkline([2.0, 2.0], columns=5, lowest=0) == "██"
    assert sparkline([float("nan")], columns=5) == ""
