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

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig, LayoutConfig, OptimizerConfig, TrainConfig
from herder.data.batch import MicroBatch
from herder.model.build import build_decoder, initialize_weights
from herder.parallel.apply import apply
from herder.parallel.mesh import build_mesh
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part, whole_tensor
from herder.plan.training import TrainingPlan, plan_training
from herder.train.optimizer import build_optimizer
from herder.train.routers import RoutingTotals
from herder.train.step import StepSettings, held_out_loss, train_step

TOKENS = 24
STEPS = 3
BATCHES = 4
RELATIVE = 1e-5
"""fp32 sums in another order differ by 1e-7, of which three steps make some 1e-6."""
BALANCE = {"scoring": "sigmoid", "correction_bias": True, "correction_bias_update_rate": 0.01}


def architecture(kinds: str, *, tied: bool = True) -> ArchitectureConfig:
    """One layer a letter: d dense, m with experts."""
    layers = {"d": LayerSpec(), "m": LayerSpec(feed_forward="routed")}
    moe = MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=16,
        normalize_weights=True,
        aux_loss_coefficient=0.5,
        z_loss_coefficient=0.05,
        **BALANCE,
    )
    return ArchitectureConfig(
        vocab_size=64,
        hidden_size=32,
        max_position_embeddings=64,
        norm=NormConfig(eps=1e-5),
        tie_embeddings=tied,
        attention=GroupedQueryAttention(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            scale=8**-0.5,
            qk_norm="head",
            sinks=True,
        ),
        ropes=(RopeConfig(theta=1e4, rotary_dim=8),),
        mlp=MlpConfig(intermediate_size=48),
        moe=moe if "m" in kinds else None,
        layers=tuple(layers[kind] for kind in kinds),
        initializer_range=0.2,
    )


MODELS = {
    "dense": architecture("dddd"),
    "untied": architecture("dddd", tied=False),
    "routed": architecture("dmdm"),  # some stages have a router, some have none
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
        train: dict[str, Any] = {
            "sequence_length": TOKENS,
            "micro_batch_size": 1,
            "global_batch_tokens": TOKENS * BATCHES,
            "precision": "fp32",
            "recompute": self.recompute,
        }
        cluster = ClusterConfig(nodes=1, gpus_per_node=self.num_ranks, gpu=gpu("cpu"))
        return plan_training(MODELS[self.model], cluster, TrainConfig(**train), self.layout)


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


def micro_batches(seed: int, count: int, num_tokens: int = TOKENS) -> list[MicroBatch]:
    """Two documents each, of which one is cut short by padding."""
    batches = []
    for index in range(count):
        generator = torch.Generator().manual_seed(100 * seed + index)
        ids = torch.randint(0, 64, (num_tokens + 1,), generator=generator)
        lengths = (7 + index, num_tokens - 7 - index)
        is_real = torch.arange(num_tokens) < num_tokens - 3 * (index % 2)
        batches.append(
            MicroBatch(
                tokens_T=ids[:-1],
                positions_T=torch.cat([torch.arange(length) for length in lengths]),
                targets_T=ids[1:],
                weights_T=is_real.float(),
                real_T=is_real,
                document_lengths=lengths,
                first_token=index * num_tokens,
            )
        )
    return batches


def train(case: Case, plan: TrainingPlan) -> Seen:
    """Some steps over the same micro-batches, with held-out text in between."""
    decoder, device = build_decoder(MODELS[case.model]), torch.device("cpu")
    mesh = build_mesh(plan.mesh_axes, "cpu") if plan.layout.num_ranks > 1 else None
    parallel = apply(decoder, plan, mesh, device=device)
    initialize_weights(decoder, seed=3, place=copy_part)
    config = OptimizerConfig(learning_rate=3e-3, epsilon=1e-5)
    optimizer = build_optimizer(decoder.named_parameters(), config)
    settings = StepSettings(
        device=device, precision="fp32", loss_chunk_tokens=16, clip_norm=1.0, parallel=parallel
    )
    index, count = parallel.data_shard
    held_out = [*micro_batches(1, 4), *micro_batches(2, 1, num_tokens=TOKENS - 6)]
    told, numbers, routing, gradients = None, [], [], {}
    for step in range(STEPS):
        result = train_step(decoder, optimizer, micro_batches(0, BATCHES)[index::count], settings)
        numbers.append(
            (result.loss, result.gradient_norm, result.aux_loss or 0, result.z_loss or 0)
        )
        routing.append(result.routing)
        if step == 0:
            named = decoder.named_parameters()
            gradients = {as_alone(name, case): whole_tensor(p.grad).clone() for name, p in named}
            told = held_out_loss(decoder, held_out, settings)
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
