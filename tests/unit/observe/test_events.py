"""Events: what is written can be read again, and no sink can end a run."""

import json
import math

import pytest

from herder.observe.events import (
    Bus,
    CheckpointLoaded,
    CheckpointSaved,
    EvaluationFinished,
    Event,
    Incident,
    Notice,
    RouterStats,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StepFinished,
    from_json,
    to_json,
)

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
    peak_flops_per_second=1e11,
    peak_source="measured here",
    config_hash="abc",
    git_commit=None,
)


def step_finished(step: int, *, loss: float = 2.5, seconds_left: float = 65.0) -> StepFinished:
    return StepFinished(
        step=step,
        loss=loss,
        gradient_norm=1.25,
        learning_rate=3e-4,
        tokens=60,
        seconds=0.5,
        tokens_per_second=128.0,
        model_flops_utilization=0.375,
        peak_memory_bytes=1_500_000_000,
        seconds_left=seconds_left,
    )


EVENTS: list[Event] = [
    STARTED,
    step_finished(1),
    RouterStats(
        step=1,
        layer=0,
        tokens=60,
        selections=(60, 58, 2, 0),
        imbalance=2.0,
        entropy=0.5,
        max_entropy=math.log(4),
        dead=(3,),
        dominant=(0, 1),
        dropped_tokens=0,
    ),
    CheckpointSaved(step=1, path="runs/a/checkpoints/step-00000001", num_bytes=10, seconds=0.1),
    CheckpointLoaded(step=1, path="runs/a/checkpoints/step-00000001", seconds=0.1),
    EvaluationFinished(step=1, loss=2.0, perplexity=math.exp(2.0), tokens=100, seconds=1.0),
    Notice(message="train.steps: 10 -> 20"),
    Incident(kind="non_finite_loss", message="loss is nan", step=3),
    RunInterrupted(step=3, signal="SIGTERM"),
    RunFinished(
        step=10,
        loss=2.0,
        seconds=5.0,
        tokens=600,
        tokens_per_second=120.0,
        model_flops_utilization=None,
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_written_as_json_reads_back_equal(event: Event) -> None:
    assert from_json(to_json(event, unix_seconds=1.0)) == event


def test_a_line_names_its_event_and_its_time() -> None:
    line = json.loads(to_json(STARTED, unix_seconds=12.3456))
    assert (line["event"], line["unix_seconds"]) == ("RunStarted", 12.346)


def test_a_log_from_before_routers_were_watched_can_still_be_read() -> None:
    line = json.loads(to_json(step_finished(1), unix_seconds=0.0))
    del line["aux_loss"], line["z_loss"]
    assert from_json(json.dumps(line)) == step_finished(1)


def test_a_loss_that_is_not_finite_is_null_and_the_line_stays_json() -> None:
    line = json.loads(to_json(step_finished(1, loss=float("nan")), unix_seconds=0.0))
    assert line["loss"] is None


@pytest.mark.parametrize("line", ["", "{", '{"event": "Nothing"}', '{"event": "Notice"}', "3"])
def test_a_line_that_is_not_a_whole_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(line)


class Collecting:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        assert unix_seconds > 0
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Failing:
    """A sink on a full disk."""

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        raise OSError(28, "No space left on device", str(type(event)), unix_seconds)

    def close(self) -> None:
        raise OSError("cannot close")


def test_a_sink_that_raises_is_reported_once_and_the_others_hear_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    after = Collecting()
    bus = Bus([Failing(), after])
    for event in EVENTS:
        bus.emit(event)
    bus.close()
    assert after.events == EVENTS
    assert after.closed
    told = capsys.readouterr().err
    assert told.count("Failing failed") == 1
    assert "No space left" in told


def test_a_keyboard_interrupt_in_a_sink_is_not_swallowed() -> None:
    class Interrupted(Collecting):
        def receive(self, event: Event, *, unix_seconds: float) -> None:
            raise KeyboardInterrupt(event, unix_seconds)

    with pytest.raises(KeyboardInterrupt):
        Bus([Interrupted()]).emit(STARTED)
