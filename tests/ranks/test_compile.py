"""Compiled layers on several ranks: the numbers of eager ones, one graph a kind of layer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

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
from herder.parallel.shards import copy_part
from herder.plan.training import TrainingPlan, plan_training
from herder.train.optimizer import build_optimizer
from herder.train.step import StepSettings, train_step

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


def architecture(kinds: str) -> ArchitectureConfig:
    """One layer a letter: d dense, w dense with a window, m with experts."""
    layers = {
        "d": LayerSpec(),
        "w": LayerSpec(attention="sliding", window=8),
        "m": LayerSpec(feed_forward="routed"),
    }
    return ArchitectureConfig(
        vocab_size=64,
        hidden_size=32,
        max_position_embeddings=64,
        norm=NormConfig(eps=1e-5),
        tie_embeddings=True,
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
        moe=MoeConfig(
            num_experts=4,
            num_experts_per_token=2,
            expert_intermediate_size=16,
            scoring="softmax",
            normalize_weights=True,
        )
        if "m" in kinds
        else None,
        layers=tuple(layers[kind] for kind in kinds),
        initializer_range=0.2,
    )


def planned(model: ArchitectureConfig, layout: LayoutConfig, recompute: Any) -> TrainingPlan:
    cluster = ClusterConfig(nodes=1, gpus_per_node=2, gpu=gpu("cpu"))
    train = TrainConfig(
        sequence_length=TOKENS,
        micro_batch_size=1,
        global_batch_tokens=4 * TOKENS,
        precision="fp32",
        recompute=recompute,
    )
    return plan_training(model, cluster, train, layout)


def micro_batches(step: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    batches = []
    for number in range(4):
        tokens_T = torch.randint(0, 64, (TOKENS + 1,), generator=generator)
        lengths = (10 + number, TOKENS - 10 - number)
        batches.append(
            MicroBatch(
                tokens_T=tokens_T[:-1],
                positions_T=torch.cat([torch.arange(length) for length in lengths]),
                targets_T=tokens_T[1:],
                weights_T=torch.ones(TOKENS),
                real_T=torch.ones(TOKENS, dtype=torch.bool),
                document_lengths=lengths,
                first_token=number * TOKENS,
            )
        )
    return batches


def run_steps(model: ArchitectureConfig, plan: TrainingPlan, backend: str | None) -> Seen:
    """Train on this rank, compiled by `backend` or eagerly, and count what dynamo made."""
    torch.compiler.set_default_backend(backend)
    counters.clear()
    decoder, device = build_decoder(model), torch.device("cpu")
    mesh = build_mesh(plan.mesh_axes, "cpu")
    parallel = apply(decoder, plan, mesh, device=device, compiled=backend is not None)
    initialize_weights(decoder, seed=3, place=copy_part)
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig(epsilon=1e-5))
    settings = StepSettings(
        device=device, precision="fp32", loss_chunk_tokens=16, clip_norm=1.0, parallel=parallel
    )
    index, count = parallel.data_shard
    results = [
        train_step(decoder, optimizer, micro_batches(step)[index::count], settings)
        for step in range(STEPS)
    ]
    return Seen(
        [number for result in results for number in (result.loss, result.gradient_norm)],
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
    )


def run_both(model: ArchitectureConfig, plan: TrainingPlan, backend: str) -> tuple[Seen, Seen]:
    return run_steps(model, plan, None), run_steps(model, plan, backend)


def compare_with_eager(kinds: str, layout: str, backend: str, *, recompute: str = "none") -> Seen:
    model = architecture(kinds)
    plan = planned(model, LAYOUTS[layout], recompute)
    eager, compiled = run_on_ranks(run_both, 2, model, plan, backend)[0]
    assert eager.num_graphs == 0
    assert compiled.numbers == pytest.approx(eager.numbers, rel=1e-6)
    return compiled


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
