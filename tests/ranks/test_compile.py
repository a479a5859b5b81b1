"""Compiled layers on several ranks: the numbers of eager ones, one graph a kind of layer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.utils import counters

from herder.config.architecture import ArchitectureConfig
from herder.config.run import LayoutConfig
from herder.parallel.ranks import run_on_ranks
from herder.plan.training import TrainingPlan
from tests.tiny import micro_batches, plan_on_cpus, planned_trainer, tiny_model

TOKENS = 32
STEPS = 2
LAYOUTS = {
    "copies": LayoutConfig(zero_stage=0),
    "sharded": LayoutConfig(zero_stage=3),
    "tensor": LayoutConfig(tensor_parallel_size=2),
}


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its steps."""

    numbers: list[float]
    """Loss and gradient norm of each."""
    num_graphs: int
    num_breaks: int


def run_steps(model: ArchitectureConfig, plan: TrainingPlan, backend: str | None) -> Seen:
    """Train on this rank, compiled by `backend` or eagerly, and count what dynamo made."""
    torch.compiler.set_default_backend(backend)
    counters.clear()
    run = planned_trainer(model, plan, compiled=backend is not None)
    results = [run.step(micro_batches(step, 4, TOKENS)) for step in range(STEPS)]
    return Seen(
        [number for result in results for number in (result.loss, result.gradient_norm)],
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
    )


def run_both(model: ArchitectureConfig, plan: TrainingPlan, backend: str) -> tuple[Seen, Seen]:
    return run_steps(model, plan, None), run_steps(model, plan, backend)


def compare_with_eager(kinds: str, layout: str, backend: str, *, recompute: str = "none") -> Seen:
    model = tiny_model(kinds, attention={"qk_norm": "head", "sinks": True})
    train = {"sequence_length": TOKENS, "global_batch_tokens": 4 * TOKENS, "recompute": recompute}
    plan = plan_on_cpus(model, 2, LAYOUTS[layout], **train)
    eager, compiled = run_on_ranks(run_both, 2, model, plan, backend)[0]
    assert eager.num_graphs == 0
    assert compiled.numbers == pytest.approx(eager.numbers, rel=1e-6)
    return compiled


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("layout", ["tensor", "sharded"])
def test_two_compiled_ranks_do_the_steps_of_two_eager_ones(layout: str) -> None:
    compiled = compare_with_eager("dd", layout, "inductor")
    assert (compiled.num_graphs, compiled.num_breaks) == (1, 0)


@pytest.mark.parametrize("layout", ["copies", "tensor"])
def test_every_kind_of_layer_has_one_graph_however_many_layers_there_are(layout: str) -> None:
    compiled = compare_with_eager("dwmdwm", layout, "eager", recompute="full")
    assert (compiled.num_graphs, compiled.num_breaks) == (3, 0)


def test_a_sharded_router_breaks_the_graph_of_its_kind_of_layer_on_its_way_in_and_out() -> None:
    """It is a unit of its own, in fp32, and what gathers its parameters is not traced. Counts of
    experts break nothing: they stay inside custom operators."""
    compiled = compare_with_eager("dwmdwm", "sharded", "eager")
    assert compiled.num_breaks == 2
    assert compiled.num_graphs == 2 + 4
