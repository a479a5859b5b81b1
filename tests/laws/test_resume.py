"""A resumed run is the unbroken run: the same losses, norms and weights, to the last bit."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import pytest
import torch

from herder.checkpoint.directory import newest_checkpoint
from herder.checkpoint.source import ModelSource
from herder.config.run import CheckpointConfig, RunConfig
from herder.errors import CheckpointError
from herder.observe.events import Bus, Event, StepFinished
from herder.train.build import build_run
from herder.train.loop import train
from herder.train.prepare import plan_run
from herder.train.resume import find_checkpoint, load_progress
from herder.train.source import find_model
from herder.train.state import TrainRun, state_tensors
from tests.tiny import HERDER_JSON, LLAMA_JSON

STEPS = 6
WORDS = ("herd", "sheep", "wolf", "gate", "field", "rain", "night", "bell", "hill", "dog")
ROUTED = {
    **HERDER_JSON,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "router_scoring": "sigmoid",
    "router_noise": {"std": 0.5, "decay_steps": STEPS - 1},
    "router_z_loss_coef": 0.001,
}
BIAS = "layers.0.feed_forward.router.correction_bias"


class Steps:
    """A sink that keeps the numbers of every step."""

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[object, ...]] = {}

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        if isinstance(event, StepFinished):
            assert unix_seconds > 0
            self.numbers[event.step] = (
                event.loss,
                event.gradient_norm,
                event.learning_rate,
                event.aux_loss,
                event.z_loss,
            )

    def close(self) -> None:
        """Nothing is held."""


class StopAfter:
    """Asks to stop once so many steps are done, as a signal would."""

    def __init__(self, steps: int, sink: Steps) -> None:
        self.steps, self.sink = steps, sink

    def __call__(self) -> Signals | None:
        return SIGTERM if len(self.sink.numbers) >= self.steps else None


@pytest.fixture
def start(
    tmp_path: Path, small_tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Callable[[str], tuple[TrainRun, Bus, Steps]]]:
    """Makes a builder of runs of one recipe in directories of one's choice."""
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(small_tokenizer_json)
    chooser = random.Random(1)
    paragraphs = [" ".join(chooser.choices(WORDS, k=chooser.randint(5, 60))) for _ in range(80)]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))

    def recipe(
        model: dict[str, Any] = LLAMA_JSON, **train_settings: Any
    ) -> Callable[[str], tuple[TrainRun, Bus, Steps]]:
        def build(name: str) -> tuple[TrainRun, Bus, Steps]:
            settings = {
                "steps": STEPS,
                "sequence_length": 32,
                "micro_batch_size": 2,
                "global_batch_tokens": 128,
                "schedule": {"kind": "cosine", "warmup_steps": 2},
                **train_settings,
            }
            config = RunConfig.model_validate(
                {
                    "run_directory": str(tmp_path / name),
                    "model": {"config": model, "initialize": "random"},
                    "data": {"source": str(tmp_path / "text.txt")},
                    "checkpoint": {"every_steps": 100},
                    "train": settings,
                }
            )
            return build_from(config, tmp_path / "tokenizer.json")

        return build

    return recipe


def build_from(config: RunConfig, tokenizer: Path) -> tuple[TrainRun, Bus, Steps]:
    def resolve(name: str) -> ModelSource:
        raise AssertionError(f"the recipe has a config, yet {name} is resolved")

    run_directory = Path(config.run_directory)
    run_directory.mkdir(exist_ok=True)
    source = find_model(config.model, resolve)
    config, plan = plan_run(config, source)
    sink = Steps()
    bus = Bus([sink])
    checkpoint = find_checkpoint(run_directory, config, bus)
    run = build_run(
        config,
        source,
        tokenizer=tokenizer,
        plan=plan,
        device=torch.device("cpu"),
        is_resumed=checkpoint is not None,
    )
    return run, bus, sink


def weights(run: TrainRun) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in state_tensors(run.decoder, run.optimizer).model.items()
    }


def told(value: Any) -> str:
    """A parameter in a test's name: the model's type, or the settings."""
    if not isinstance(value, dict):
        return str(value)
    return value["model_type"] if "model_type" in value else "-".join(value.values())


FP32, BF16 = {"precision": "fp32"}, {"precision": "bf16"}
RECOMPUTED = {"precision": "bf16", "recompute": "full"}


@pytest.mark.parametrize(
    ("model", "settings", "stopped_after"),
    [
        *((LLAMA_JSON, settings, step) for settings in (FP32, BF16, RECOMPUTED) for step in (1, 4)),
        (ROUTED, FP32, 4),
        (ROUTED, RECOMPUTED, 1),
    ],
    ids=told,
)
def test_a_run_that_was_stopped_and_resumed_equals_the_unbroken_one(
    start: Callable[..., Callable[[str], tuple[TrainRun, Bus, Steps]]],
    model: dict[str, Any],
    settings: dict[str, str],
    stopped_after: int,
) -> None:
    build = start(model, **settings)
    run, bus, unbroken = build("unbroken")
    train(run, run.progress(step=0, tokens=0), bus, stop_signal=lambda: None)
    expected = weights(run)

    run, bus, first = build("broken")
    stop = StopAfter(stopped_after, first)
    outcome = train(run, run.progress(step=0, tokens=0), bus, stop_signal=stop)
    assert (outcome.step, outcome.stopped_by) == (stopped_after, SIGTERM)

    run, bus, second = build("broken")
    checkpoint = newest_checkpoint(run.run_directory)
    assert checkpoint is not None
    progress = load_progress(run, checkpoint, bus)
    assert progress.step == stopped_after
    outcome = train(run, progress, bus, stop_signal=lambda: None)
    assert outcome.step == STEPS

    assert first.numbers | second.numbers == unbroken.numbers
    assert sorted(second.numbers) == list(range(stopped_after + 1, STEPS + 1))
    resumed = weights(run)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert (BIAS in expected) == (model is ROUTED)


def test_the_comparison_would_notice_lost_optimizer_state(
    start: Callable[..., Callable[[str], tuple[TrainRun, Bus, Steps]]],
) -> None:
    build = start(precision="fp32")
    run, bus, unbroken = build("unbroken")
    train(run, run.progress(step=0, tokens=0), bus, stop_signal=lambda: None)
    run, bus, first = build("broken")
    train(run, run.progress(step=0, tokens=0), bus, stop_signal=StopAfter(3, first))
    run, bus, second = build("broken")
    checkpoint = newest_checkpoint(run.run_directory)
    assert checkpoint is not None
    progress = load_progress(run, checkpoint, bus)
    for tensor in state_tensors(run.decoder, run.optimizer).optimizer.values():
        tensor.zero_()
    train(run, progress, bus, stop_signal=lambda: None)
    assert second.numbers[4] == unbroken.numbers[4]
    assert second.numbers[6] != unbroken.numbers[6]


def test_the_comparison_would_notice_a_lost_correction_bias(
    start: Callable[..., Callable[[str], tuple[TrainRun, Bus, Steps]]],
) -> None:
    build = start(ROUTED, precision="fp32")
    run, bus, unbroken = build("unbroken")
    train(run, run.progress(step=0, tokens=0), bus, stop_signal=lambda: None)
    run, bus, first = build("broken")
    train(run, run.progress(step=0, tokens=0), bus, stop_signal=StopAfter(4, first))
    run, bus, second = build("broken")
    checkpoint = newest_checkpoint(run.run_directory)
    assert checkpoint is not None
    progress = load_progress(run, checkpoint, bus)
    run.decoder.get_buffer(BIAS).add_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    train(run, progress, bus, stop_signal=lambda: None)
    assert second.numbers[5] != unbroken.numbers[5]


def test_a_save_that_fails_behind_the_steps_ends_the_run_and_the_one_before_is_good(
    start: Callable[..., Callable[[str], tuple[TrainRun, Bus, Steps]]],
) -> None:
    run, bus, sink = start(precision="fp32")("broken")
    saves = CheckpointConfig(every_steps=2)
    run = replace(run, config=run.config.model_copy(update={"checkpoint": saves}))

    class Full(dict[str, bytes]):
        """Files that there is no room for when they are saved a second time."""

        num_saves = 0

        def items(self) -> Any:
            self.num_saves += 1
            return {"no/such/folder": b""}.items() if self.num_saves > 1 else super().items()

    run = replace(run, model_files=Full(run.model_files))
    with pytest.raises(CheckpointError, match="step-00000004 could not be written"):
        train(run, run.progress(step=0, tokens=0), bus, stop_signal=lambda: None)
    assert len(sink.numbers) in (4, 5, 6)
    newest = newest_checkpoint(run.run_directory)
    assert newest is not None
    assert newest.name == "step-00000002"
