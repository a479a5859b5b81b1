"""A run on several ranks: the losses of one process, checkpoints that any layout goes on from."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from signal import SIGTERM, Signals

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from herder.checkpoint.directory import checkpoint_path
from herder.config.run import CheckpointConfig, RunConfig
from herder.errors import CheckpointError
from herder.observe.events import Bus, Event, StepFinished
from herder.parallel.mesh import build_mesh
from herder.parallel.ranks import run_on_ranks
from herder.train.build import build_run
from herder.train.loop import train
from herder.train.prepare import plan_run
from herder.train.resume import find_checkpoint, load_progress
from herder.train.source import find_model
from tests.tiny import HERDER_JSON

STEPS = 4
MODEL = {
    **HERDER_JSON,
    "moe_intermediate_size": 16,
    "router_noise": {"std": 0.5, "decay_steps": 8},
}
LAYOUTS: Mapping[str, tuple[int, dict[str, int]]] = {
    "copies": (2, {"zero_stage": 0}),
    "sharded": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "stages": (2, {"pipeline_parallel_size": 2}),
    "tensor and sharded": (4, {"tensor_parallel_size": 2, "zero_stage": 1}),
}


class Steps:
    """A sink that keeps the numbers of every step."""

    def __init__(self) -> None:
        self.seen = list[StepFinished]()

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        if isinstance(event, StepFinished):
            self.seen.append(event)

    def close(self) -> None: ...


def recipe(folder: Path, name: str, num_ranks: int, layout: Mapping[str, int]) -> RunConfig:
    train = {"steps": STEPS, "sequence_length": 32, "micro_batch_size": 2, "precision": "fp32"}
    return RunConfig.model_validate(
        {
            "run_directory": str(folder / name),
            "model": {"config": MODEL, "initialize": "random"},
            "data": {"source": str(folder / "text.txt")},
            "cluster": {"nodes": 1, "gpus_per_node": num_ranks, "gpu": "cpu"},
            "layout": dict(layout),
            "checkpoint": {"every_steps": 100},
            "train": {
                **train,
                "global_batch_tokens": 256,
                "optimizer": {"epsilon": 1e-5, "learning_rate": 1e-2},
            },
        }
    )


def run_steps(config: RunConfig, tokenizer: Path, stop_on: int | None) -> list[tuple[float, ...]]:
    """Train, or go on, on this rank; the rank `stop_on` is asked to stop after the second step."""
    source = find_model(config.model, lambda _: pytest.fail("the recipe has a config"))
    config, plan = plan_run(config, source)
    mesh = None
    if plan.layout.num_ranks > 1:
        mesh = build_mesh(plan.mesh_axes, "cpu")
    is_first = mesh is None or mesh.get_rank() == 0
    run_directory, sink = Path(config.run_directory), Steps()
    run_directory.mkdir(exist_ok=True)
    bus = Bus([sink] if is_first else [])
    checkpoint = find_checkpoint(run_directory, config, bus)
    run = build_run(
        config,
        source,
        tokenizer=tokenizer,
        plan=plan,
        device=torch.device("cpu"),
        mesh=mesh,
        is_resumed=checkpoint is not None,
    )
    start = run.progress(step=0, tokens=0)
    if checkpoint is not None:
        start = load_progress(run, checkpoint, bus)
    is_asked = stop_on is not None and (mesh is None or mesh.get_rank() == stop_on)
    steps_done = iter(range(1 << 20))

    def stop_signal() -> Signals | None:
        return SIGTERM if next(steps_done) >= 2 and is_asked else None

    train(run, start, bus, stop_signal=stop_signal)
    return [(e.step, e.loss, e.gradient_norm, e.aux_loss or 0.0, e.tokens) for e in sink.seen]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_json: str) -> Path:
    folder = tmp_path_factory.mktemp("training")
    words = ("herd", "sheep", "wolf", "gate", "field", "rain", "night", "bell", "hill", "dog")
    lines = (" ".join(words[i % 7 :: i % 3 + 1] * (i % 5 + 1)) for i in range(60))
    (folder / "text.txt").write_text("\n\n".join(lines))
    (folder / "tokenizer.json").write_text(small_tokenizer_json)
    return folder


@pytest.fixture(scope="module")
def alone(corpus: Path) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]:
    """Steps and weights of the run in one process."""
    config = recipe(corpus, "alone", 1, {})
    steps = run_steps(config, corpus / "tokenizer.json", None)
    return steps, load_file(checkpoint_path(corpus / "alone", STEPS) / "model.safetensors")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_stopped_on_one_layout_ends_in_one_process_as_if_it_had_been_there_all_along(
    corpus: Path, alone: tuple[list[tuple[float, ...]], dict[str, torch.Tensor]], name: str
) -> None:
    num_ranks, layout = LAYOUTS[name]
    config = recipe(corpus, name.replace(" ", "-"), num_ranks, layout)
    tokenizer = corpus / "tokenizer.json"
    on_ranks = run_on_ranks(run_steps, num_ranks, config, tokenizer, num_ranks - 1)
    assert [step for step, *_ in on_ranks[0]] == [1, 2]  # whichever rank was asked
    assert not any(on_ranks[1:])  # the first rank alone tells
    at_home = config.model_copy(update={"cluster": None, "layout": "auto"})
    steps = on_ranks[0] + run_steps(at_home, tokenizer, None)
    expected, weights = alone
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=2e-5, atol=1e-6)
    ended = load_file(checkpoint_path(Path(config.run_directory), STEPS) / "model.safetensors")
    assert ended.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(ended[key], weight, rtol=1e-4, atol=1e-5, msg=key)


def run_with_little_room(config: RunConfig, tokenizer: Path) -> str:
    """What is told where the second rank cannot write more than a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        run_steps(config, tokenizer, None)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def test_a_disk_that_is_full_for_one_rank_behind_the_steps_ends_the_run_on_all_of_them(
    corpus: Path,
) -> None:
    config = recipe(corpus, "full", 2, {"zero_stage": 3})
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every_steps=1)})
    told = run_on_ranks(run_with_little_room, 2, config, corpus / "tokenizer.json")
    assert told[0] == told[1]
    assert "step-00000001 could not be written: File too large" in told[0]
    assert list((corpus / "full" / "checkpoints").iterdir()) == []
