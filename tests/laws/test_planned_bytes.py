"""Planned state bytes = allocated bytes: the planner counts what tensors add up to on a rank.

The figures of a plan are those of its largest rank, so the largest of all ranks' sums is compared,
exactly. Widths of the model do not divide by three, so that shards are uneven and padded; there are
fewer key-value heads than tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

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
from herder.parallel.shards import copy_part, held_tensor
from herder.parallel.sync import Sync
from herder.plan.training import TrainingPlan, plan_training
from herder.train.optimizer import build_optimizer
from herder.train.step import StepSettings, train_step

TOKENS = 16
CELLS = [
    {"zero_stage": stage, "gradient_dtype": gradients, "precision": precision}
    for stage, gradients, precision in product(range(4), ("fp32", "bf16"), ("fp32", "bf16"))
]
MODEL = ArchitectureConfig(
    vocab_size=62,
    hidden_size=20,
    max_position_embeddings=64,
    norm=NormConfig(eps=1e-5),
    tie_embeddings=False,
    attention=GroupedQueryAttention(
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        scale=8**-0.5,
        qkv_bias=True,
        output_bias=True,
        qk_norm="head",
        sinks=True,
    ),
    ropes=(RopeConfig(theta=10_000.0, rotary_dim=8),),
    mlp=MlpConfig(intermediate_size=28, bias=True),
    moe=MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=12,
        shared_expert_intermediate_size=10,
        shared_expert_gate=True,
        scoring="softmax",
        normalize_weights=True,
        expert_bias=True,
        router_bias=True,
    ),
    layers=(LayerSpec(), LayerSpec(feed_forward="routed")),
)
TIED = MODEL.model_copy(update={"tie_embeddings": True, "moe": None, "layers": (LayerSpec(),) * 2})


def plan_of(
    model: ArchitectureConfig, num_ranks: int, *, tp: int, pp: int, copies: int, **cell: Any
) -> TrainingPlan:
    """Two micro-batches on every data-parallel rank."""
    train = TrainConfig(
        sequence_length=TOKENS,
        micro_batch_size=1,
        global_batch_tokens=2 * TOKENS * num_ranks // (tp * pp),
        precision=cell["precision"],
        gradient_dtype=cell["gradient_dtype"],
    )
    layout = LayoutConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        zero_stage=cell["zero_stage"],
        data_parallel_replicas=copies,
    )
    return plan_training(
        model, ClusterConfig(gpus_per_node=num_ranks, gpu=gpu("cpu")), train, layout
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """What they take, whatever they are views of; what several share once."""
    storages = (held_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def unit_parameters(decoder: nn.Module) -> list[Any]:
    """FSDP's own records: it keeps gradients of a wider dtype where no parameter shows them."""
    units = [module for module in decoder.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return [parameter for group in groups for parameter in group.fsdp_params]


class Watch:
    """What a rank has allocated at the moments that a plan speaks of."""

    def __init__(self, decoder: nn.Module, optimizer: Optimizer, sync: Sync) -> None:
        self.decoder = decoder
        self.sync = sync
        self.kept = list(decoder.parameters())
        self.told = dict[str, int]()
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self._at_the_step())

    def expect_last(self, *, is_last: bool) -> None:
        if is_last:
            self.told["gathered_parameters"] = self._gathered()
            self.told["accumulated_gradients"] = self._gradients()
        self.sync.expect_last(is_last=is_last)

    def finish(self) -> None:
        self.sync.finish()

    def release(self) -> None:
        self.sync.release()

    def _at_the_step(self) -> None:
        assert self._gathered() == 0, "parameters are still gathered when the optimizer steps"
        self.told["reduced_gradients"] = self._gradients()

    def at_the_end(self) -> dict[str, int]:
        states = (state for state in self.optimizer.state.values())
        kept = {"parameters": storage_bytes(self.kept)}
        kept["optimizer"] = storage_bytes(x for state in states for x in state.values())
        return {**self.told, **kept}

    def _gathered(self) -> int:
        return storage_bytes(
            x for each in unit_parameters(self.decoder) for x in each.all_gather_outputs
        )

    def _gradients(self) -> int:
        units = unit_parameters(self.decoder)
        whole = [each._unsharded_param.grad for each in units if hasattr(each, "_unsharded_param")]
        wider = [each.unsharded_accumulated_grad for each in units]
        shown = [parameter.grad for parameter in self.kept]
        return storage_bytes(x for x in (*whole, *wider, *shown) if x is not None)


def batch(number: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 62, (TOKENS + 1,), generator=generator)
    return MicroBatch(
        tokens_T=tokens[:-1],
        positions_T=torch.arange(TOKENS),
        targets_T=tokens[1:],
        weights_T=torch.ones(TOKENS),
        real_T=torch.ones(TOKENS, dtype=torch.bool),
        document_lengths=(TOKENS,),
    )


def allocated(model: ArchitectureConfig, plans: Sequence[TrainingPlan]) -> list[dict[str, int]]:
    """Of each plan in turn, on this rank."""
    return [_allocated(model, plan) for plan in plans]


def _allocated(model: ArchitectureConfig, plan: TrainingPlan) -> dict[str, int]:
    device = torch.device("cpu")
    decoder, mesh = build_decoder(model), build_mesh(plan.mesh_axes, "cpu")
    parallel = apply(decoder, plan, mesh, device=device)
    initialize_weights(decoder, seed=0, place=copy_part)
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    watch = Watch(decoder, optimizer, parallel.sync)
    precision: Literal["fp32", "bf16"] = plan.precision.compute
    settings = StepSettings(
        device=device,
        precision=precision,
        loss_chunk_tokens=TOKENS,
        clip_norm=1.0,
        parallel=replace(parallel, sync=watch),
    )
    index, count = parallel.data_shard
    train_step(decoder, optimizer, [batch(n) for n in range(index, 2 * count, count)], settings)
    return watch.at_the_end()


@pytest.mark.parametrize(
    ("model", "num_ranks", "tp", "pp", "copies"),
    [
        pytest.param(MODEL, 3, 1, 1, 1, id="three shards"),
        pytest.param(MODEL, 4, 2, 1, 1, id="tensor parallel, two shards"),
        pytest.param(MODEL, 4, 1, 2, 1, id="two stages, two shards"),
        pytest.param(TIED, 4, 1, 1, 2, id="tied, two copies of two shards"),
    ],
)
def test_state_takes_the_bytes_that_were_planned(
    model: ArchitectureConfig, num_ranks: int, tp: int, pp: int, copies: int
) -> None:
    cells = CELLS
    if copies > 1 or pp > 1:
        cells = [cell for cell in CELLS if cell["zero_stage"] > 0 and cell["precision"] == "bf16"]
    degrees = {"tp": tp, "pp": pp, "copies": copies}
    plans = [plan_of(model, num_ranks, **degrees, **cell) for cell in cells]
    found = run_on_ranks(allocated, num_ranks, model, plans)
    for number, (cell, plan) in enumerate(zip(cells, plans, strict=True)):
        ranks = [each[number] for each in found]
        largest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        planned = plan.state_bytes.model_dump(exclude={"stage"})
        if pp > 1:  # a pipeline is not watched between micro-batches
            planned = {name: planned[name] for name in largest}
            assert planned.keys() == {"parameters", "reduced_gradients", "optimizer"}
        assert largest == planned, cell
