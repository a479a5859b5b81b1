"""Pipeline stages on several ranks: the numbers of one process, by every schedule."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from herder.config.architecture import ArchitectureConfig
from herder.config.run import LayoutConfig
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import whole_tensor
from herder.plan.training import TrainingPlan
from herder.train.routers import RoutingTotals
from herder.train.step import held_out_loss
from tests.tiny import MOE, micro_batches, plan_on_cpus, planned_trainer, tiny_model

TOKENS = 24
STEPS = 3
BATCHES = 4
RELATIVE = 1e-5
"""fp32 sums in another order differ by 1e-7, of which three steps make some 1e-6."""
BALANCED = {
    "scoring": "sigmoid",
    "correction_bias": True,
    "correction_bias_update_rate": 0.01,
    "aux_loss_coefficient": 0.5,
    "z_loss_coefficient": 0.05,
}


def architecture(kinds: str, **changes: Any) -> ArchitectureConfig:
    attention = {"qk_norm": "head", "sinks": True}
    return tiny_model(kinds, attention=attention, **changes)


# Of "routed", some stages have a router and some have none.
MODELS = {
    "dense": architecture("dddd"),
    "untied": architecture("dddd", tie_embeddings=False),
    "routed": architecture("dmdm", moe=MOE.model_copy(update=BALANCED)),
}


@dataclass(frozen=True)
class Case:
    """A model, and how it is laid out."""

    name: str
    model: str
    num_ranks: int
    layout: LayoutConfig
    recompute: str = "none"

    def plan(self) -> TrainingPlan:
        train = {"sequence_length": TOKENS, "global_batch_tokens": TOKENS * BATCHES}
        model = MODELS[self.model]
        return plan_on_cpus(model, self.num_ranks, self.layout, recompute=self.recompute, **train)


def case(model: str, num_ranks: int, stages: int, recompute: str = "none", **layout: Any) -> Case:
    words = [f"{name}={value}" for name, value in layout.items()]
    name = " ".join([model, f"pp={stages} of {num_ranks}", *words, recompute])
    given = LayoutConfig(pipeline_parallel_size=stages, **layout)
    return Case(name, model, num_ranks, given, recompute)


TWO_RANKS = [
    case("dense", 2, 2, pipeline_schedule="gpipe"),
    case("untied", 2, 2, pipeline_schedule="1f1b"),
    case("dense", 2, 2, "full", pipeline_schedule="interleaved_1f1b"),
    case("dense", 2, 2, pipeline_schedule="zero_bubble"),
    case("routed", 2, 2, pipeline_schedule="1f1b"),
    case("routed", 2, 2, "full", pipeline_schedule="interleaved_1f1b"),
]
FOUR_RANKS = [
    case("routed", 4, 4, pipeline_schedule="1f1b"),
    case("dense", 4, 2, zero_stage=0, pipeline_schedule="1f1b"),
    case("dense", 4, 2, zero_stage=1, pipeline_schedule="zero_bubble"),
    case("routed", 4, 2, zero_stage=3, pipeline_schedule="interleaved_1f1b"),
    case("routed", 4, 2, tensor_parallel_size=2, pipeline_schedule="1f1b"),
]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its steps."""

    numbers: list[tuple[float, ...]]
    """Loss, gradient norm and the losses of routers, of each step."""
    routing: list[RoutingTotals | None]
    held_out: tuple[float, int] | None
    gradients: dict[str, Tensor]
    """Of the first step, by the names of one process."""
    state: dict[str, Tensor]
    """After the last one: parameters and biases of routers."""


def train(case: Case, plan: TrainingPlan) -> Seen:
    """Some steps over the same micro-batches, with held-out text in between."""
    run = planned_trainer(MODELS[case.model], plan, learning_rate=3e-3)
    decoder = run.decoder
    batches = micro_batches(0, BATCHES, TOKENS, pads=True)
    held_out = [*micro_batches(1, 4, TOKENS), *micro_batches(2, 1, TOKENS - 6)]
    told, numbers, routing, gradients = None, [], [], {}
    for step in range(STEPS):
        result = run.step(batches)
        numbers.append(
            (result.loss, result.gradient_norm, result.aux_loss or 0, result.z_loss or 0)
        )
        routing.append(result.routing)
        if step == 0:
            named = decoder.named_parameters()
            gradients = {as_alone(name, case): whole_tensor(p.grad).clone() for name, p in named}
            told = held_out_loss(decoder, held_out, run.settings)
    tensors = [*decoder.named_parameters(), *decoder.named_buffers()]
    state = {as_alone(name, case): whole_tensor(each).detach().clone() for name, each in tensors}
    return Seen(numbers, routing, told, gradients, state)


def as_alone(name: str, case: Case) -> str:
    """The last stage's copy of a tied embedding is the embedding."""
    tied = MODELS[case.model].tie_embeddings
    return "embed.weight" if tied and name == "head.weight" else name


def train_all(cases: list[tuple[Case, TrainingPlan]]) -> list[Seen]:
    return [train(each, plan) for each, plan in cases]


@pytest.fixture(scope="module")
def alone() -> dict[str, Seen]:
    """One process, by model."""
    cases = [Case(model, model, 1, LayoutConfig()) for model in MODELS]
    return {each.model: train(each, each.plan()) for each in cases}


@pytest.fixture(scope="module")
def laid_out() -> dict[str, list[Seen]]:
    """What each rank saw, by case; ranks are started twice for all of them."""
    seen: dict[str, list[Seen]] = {}
    for cases, num_ranks in ((TWO_RANKS, 2), (FOUR_RANKS, 4)):
        told = run_on_ranks(train_all, num_ranks, [(each, each.plan()) for each in cases])
        for index, each in enumerate(cases):
            seen[each.name] = [ranks[index] for ranks in told]
    return seen


def assert_close(told: Tensor, expected: Tensor, scale: float, what: str) -> None:
    largest = max(expected.abs().max().item(), 0.01 * scale)
    difference = (told - expected).abs().max().item() / largest
    assert difference < RELATIVE, f"{what}: {difference:.1e} of {largest:.1e}"


@pytest.mark.parametrize("case", TWO_RANKS + FOUR_RANKS, ids=lambda case: case.name)
def test_stages_train_as_one_process_does(
    case: Case, alone: dict[str, Seen], laid_out: dict[str, list[Seen]]
) -> None:
    expected, ranks = alone[case.model], laid_out[case.name]
    losses = [numbers[0] for numbers in expected.numbers]
    assert losses[-1] < 0.9 * losses[0]
    scale = max(grad.abs().max().item() for grad in expected.gradients.values())
    for seen in ranks:
        for told, one in zip(seen.numbers, expected.numbers, strict=True):
            assert told == pytest.approx(one, rel=RELATIVE)
        for name, gradient in seen.gradients.items():
            assert_close(gradient, expected.gradients[name], scale, f"gradient of {name}")
        for name, value in seen.state.items():
            assert_close(value, expected.state[name], 1.0, name)
    assert set().union(*(seen.state for seen in ranks)) == set(expected.state)
    assert set().union(*(seen.gradients for seen in ranks)) == set(expected.gradients)


@pytest.mark.parametrize("case", TWO_RANKS + FOUR_RANKS, ids=lambda case: case.name)
def test_held_out_text_has_the_same_loss_on_every_rank(
    case: Case, alone: dict[str, Seen], laid_out: dict[str, list[Seen]]
) -> None:
    expected = alone[case.model].held_out
    assert expected is not None
    for seen in laid_out[case.name]:
        assert seen.held_out is not None
        assert seen.held_out == (pytest.approx(expected[0], rel=RELATIVE), expected[1])


def test_every_rank_knows_what_the_routers_of_all_stages_chose(
    alone: dict[str, Seen], laid_out: dict[str, list[Seen]]
) -> None:
    routed = [case for case in TWO_RANKS + FOUR_RANKS if case.model == "routed"]
    assert len(routed) == 5
    for case in routed:
        for seen in laid_out[case.name]:
            for told, expected in zip(seen.routing, alone["routed"].routing, strict=True):
                assert told is not None
                assert expected is not None
                assert told.layers == expected.layers == (1, 3)
                assert torch.equal(told.counts_LE, expected.counts_LE)
                torch.testing.assert_close(told.entropy_sum_L, expected.entropy_sum_L)


def test_stages_hold_their_own_layers_alone(laid_out: dict[str, list[Seen]]) -> None:
    first, last = laid_out[TWO_RANKS[0].name]
    layers = [
        {name.split(".")[1] for name in seen.state if "layers." in name} for seen in (first, last)
    ]
    assert layers == [{"0", "1"}, {"2", "3"}]
    assert set(first.state) & set(last.state) == {"embed.weight"}
    assert torch.equal(first.state["embed.weight"], last.state["embed.weight"])
    interleaved = laid_out[TWO_RANKS[2].name]
    layers = [
        {name.split(".")[1] for name in seen.state if "layers." in name} for seen in interleaved
    ]
    assert layers == [{"0", "2"}, {"1", "3"}]


def test_torch_has_the_private_entries_that_a_list_of_micro_batches_needs() -> None:
    """As of torch 2.13: `step` cuts batches, what it calls then takes lists."""
    kinds = (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
    )
    for kind in kinds:
        entry = inspect.signature(kind._step_microbatches).parameters
        assert list(entry)[1:6] == [
            "arg_mbs",
            "kwarg_mbs",
            "target_mbs",
            "losses",
            "return_outputs",
        ]
    backward = inspect.signature(PipelineStage.backward_maybe_with_nosync).parameters
    assert list(backward) == ["self", "backward_type", "bwd_kwargs", "last_backward"]
    reduced = inspect.signature(PipelineStage.perform_reduce_grad).parameters
    assert list(reduced) == ["self", "grad_scale_factor"]
    assert inspect.isfunction(PipelineStage.clear_runtime_states)
