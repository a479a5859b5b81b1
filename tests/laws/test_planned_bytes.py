"""Planned state bytes = allocated bytes: the planner counts what tensors add up to on a rank.

The figures of a plan are those of its largest rank, so the largest of all ranks' sums is compared,
exactly. Widths of the model do not divide by three, so that shards are uneven and padded; there are
fewer key-value heads than tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from herder.checkpoint.quantizing import is_quantized
from herder.config.architecture import ArchitectureConfig, LayerSpec, MlpConfig
from herder.config.quantization import WeightQuantization
from herder.config.run import ClusterConfig
from herder.families.registry import architecture_from_hf, families
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.quantized_weight import quantized
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import held_tensor
from herder.parallel.sync import Sync
from herder.plan.serving import plan_serving
from herder.plan.training import TrainingPlan
from herder.plan.weight_format import quantized_format
from tests.tiny import MOE, micro_batch, plan_on_cpus, planned_trainer, tiny_model

TOKENS = 16
CELLS = [
    {"zero_stage": stage, "gradient_dtype": gradients, "precision": precision}
    for stage, gradients, precision in product(range(4), ("fp32", "bf16"), ("fp32", "bf16"))
]
BIASED = {
    "expert_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "shared_expert_gate": True,
    "expert_bias": True,
    "router_bias": True,
}
MODEL = tiny_model(
    "dm",
    hidden_size=20,
    tie_embeddings=False,
    attention={
        "num_key_value_heads": 1,
        "qkv_bias": True,
        "output_bias": True,
        "qk_norm": "head",
        "sinks": True,
    },
    mlp=MlpConfig(intermediate_size=28, bias=True),
    moe=MOE.model_copy(update=BIASED),
)
TIED = MODEL.model_copy(update={"tie_embeddings": True, "moe": None, "layers": (LayerSpec(),) * 2})


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize(
    "how", [WeightQuantization("int4", 32), WeightQuantization("int8", 128)], ids=str
)
def test_quantized_weights_take_the_bytes_that_were_planned(
    family: str, how: WeightQuantization
) -> None:
    architecture = architecture_from_hf(families()[family].tiny_config(), name=family)
    decoder = build_decoder(architecture, dtype=torch.bfloat16)
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    for module in decoder.modules():
        if is_quantized(module):
            setattr(module, "weight", quantized(module.weight.detach(), how))  # noqa: B010
    cluster = ClusterConfig(nodes=1, gpus_per_node=1, gpu="h100-80gb")
    plan = plan_serving(architecture, cluster, given=quantized_format(how))
    assert plan.weights_gb_per_gpu * 1e9 == pytest.approx(
        storage_bytes(decoder.parameters()), rel=1e-9
    )


def plan_of(
    model: ArchitectureConfig, num_ranks: int, *, tp: int, pp: int, copies: int, **cell: Any
) -> TrainingPlan:
    """Two micro-batches on every data-parallel rank."""
    layout = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "zero_stage": cell["zero_stage"],
        "data_parallel_replicas": copies,
    }
    return plan_on_cpus(
        model,
        num_ranks,
        layout,
        sequence_length=TOKENS,
        global_batch_tokens=2 * TOKENS * num_ranks // (tp * pp),
        precision=cell["precision"],
        gradient_dtype=cell["gradient_dtype"],
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


def allocated(model: ArchitectureConfig, plans: Sequence[TrainingPlan]) -> list[dict[str, int]]:
    """Of each plan in turn, on this rank."""
    return [_allocated(model, plan) for plan in plans]


def _allocated(model: ArchitectureConfig, plan: TrainingPlan) -> dict[str, int]:
    run = planned_trainer(model, plan)
    parallel = run.settings.parallel
    watch = Watch(run.decoder, run.optimizer, parallel.sync)
    watched = replace(run.settings, parallel=replace(parallel, sync=watch))
    _, count = parallel.data_shard
    batches = [micro_batch(number, TOKENS) for number in range(2 * count)]
    replace(run, settings=watched).step(batches)
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
    if tp * pp * copies > 1:  # axes do not change what a dtype takes
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
