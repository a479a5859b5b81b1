"""What `herder verify` is for: a fault planted on a rank fails its cell, and names what is wrong.

Each fault is one that a layout could really have. They are done to the model of a running rank,
which nothing else of the check knows of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import model_config_json
from herder.families.registry import architecture_from_hf
from herder.model.decoder import Decoder
from herder.model.experts import Experts
from herder.parallel.apply import Parallel
from herder.train.shrink import shrunk
from herder.train.verify import Tamper, verify
from herder.train.verify_layouts import parse_layouts
from herder.train.verify_report import Cell

STEPS = 3


def small(name: str = "llama-debug") -> ArchitectureConfig:
    return shrunk(architecture_from_hf(model_config_json(name), name=name))


def cell_of(
    layout: str, tamper: Tamper | None, *, model: str = "llama-debug", **more: float
) -> Cell:
    layouts = parse_layouts([layout])
    report = verify(small(model), layouts, model=model, num_steps=STEPS, tamper=tamper, **more)
    (cell,) = report.cells
    assert cell.passed == (report.problem is None)
    return cell


def no_all_reduce(_decoder: Decoder, parallel: Parallel) -> None:
    """Copies that never sum their gradients: each trains on its own share of the data."""
    (sync,) = parallel.sync.parts
    sync._buckets.clear()


def one_sum_left_out(decoder: Decoder, parallel: Parallel) -> None:
    """Tensor parallelism that forgets to sum one small parameter over its ranks."""
    (sync,) = parallel.sync.parts
    weight = decoder.layers.get_submodule("1.feed_forward_norm").weight
    for bucket in sync._buckets:
        bucket.parameters[:] = [each for each in bucket.parameters if each is not weight]


def untied_head(decoder: Decoder, _parallel: Parallel) -> None:
    """Replacing parameters unties them, and no error says so."""
    assert decoder.head is not None
    decoder.head.weight = nn.Parameter(decoder.head.weight.detach().clone())


def dropped_micro_batch(decoder: Decoder, _parallel: Parallel) -> None:
    """Every fourth micro-batch of a rank counts nothing, though its weight is in the sum."""
    seen = list[None]()

    def drop(_module: nn.Module, _arguments: Any, loss: Tensor) -> Tensor:
        seen.append(None)
        return loss * 0 if len(seen) % 4 == 0 else loss

    decoder.register_forward_hook(drop)


def mean_for_sum(decoder: Decoder, _parallel: Parallel) -> None:
    """FSDP's own habit: gradients divided by the number of ranks."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def one_gradient_halved(decoder: Decoder, _parallel: Parallel) -> None:
    """A scale that is wrong for one parameter of many, which no loss shows at first."""
    decoder.layers.get_submodule("2.attention.output").weight.register_hook(lambda grad: grad / 2)


def doubled_output(decoder: Decoder, _parallel: Parallel) -> None:
    """What no look at classes and forwards can see."""
    decoder.layers["1"].register_forward_hook(lambda _module, _arguments, x: 2 * x)


def dropped_token(decoder: Decoder, _parallel: Parallel) -> None:
    """The first token of every rank and layer reaches no expert."""

    def drop(
        dispatch: Callable[..., Any], x_TD: Tensor, chosen: Tensor, weight: Tensor, *others: Any
    ) -> Any:
        kept_T1 = (torch.arange(len(x_TD)) > 0)[:, None]
        return dispatch(x_TD, chosen, weight * kept_T1, *others)

    for module in decoder.modules():
        if isinstance(module, Experts):
            module.dispatch = partial(drop, module.dispatch)


def own_routing_sums(_decoder: Decoder, parallel: Parallel) -> None:
    """The auxiliary loss of a rank's part of the tokens in the place of all tokens'."""
    parallel.context.total = lambda x: x


def expert_gradient_doubled(decoder: Decoder, _parallel: Parallel) -> None:
    """A gradient of experts that is scaled by another number of ranks than it is summed over."""
    for module in decoder.modules():
        if isinstance(module, Experts):
            module.up.weight.register_hook(lambda grad: grad * 2)


def skipped_empty_exchange(decoder: Decoder, parallel: Parallel) -> None:
    """Of a layer where all choose experts of the first rank, and the tokens of the second none, the
    second leaves the exchange out: it has nothing to send or to receive."""
    index, _ = parallel.data_shard
    experts = decoder.layers.get_submodule("1.feed_forward.experts")
    assert isinstance(experts, Experts)
    dispatch, num_here = experts.dispatch, experts.num_experts // 2

    def skip(x_TD: Tensor, chosen_TK: Tensor, *others: Any) -> Any:
        if index == 0:
            return dispatch(x_TD, chosen_TK % num_here, *others)
        sent_SL = torch.zeros(2, num_here, dtype=torch.int64)
        got_SL = torch.empty_like(sent_SL)
        torch.distributed.all_to_all_single(got_SL, sent_SL, group=dispatch._group)
        assert not got_SL.any()
        return torch.zeros_like(x_TD, requires_grad=True), None

    experts.dispatch = skip


def broken_rank(_decoder: Decoder, parallel: Parallel) -> None:
    """A rank that dies fails its cell, not the whole check."""
    index, _ = parallel.data_shard
    if index == 1:
        raise RuntimeError("this rank is broken")


FAULTS: list[tuple[Callable[[Decoder, Parallel], None], str, set[str]]] = [
    (no_all_reduce, "dp=2", {"norm", "gradient", "parameter"}),
    (one_sum_left_out, "tp=2", {"gradient"}),
    (untied_head, "dp=2", {"gradient", "parameter"}),
    (untied_head, "tp=2", {"gradient", "parameter"}),
    (dropped_micro_batch, "dp=2", {"loss", "norm", "gradient", "parameter"}),
    (mean_for_sum, "fsdp=2", {"norm"}),
    (one_gradient_halved, "tp=2", {"gradient"}),
    (doubled_output, "tp=2", {"loss", "norm", "gradient", "parameter"}),
]


@pytest.mark.parametrize(
    ("tamper", "layout", "seen_in"), FAULTS, ids=[f"{f[0].__name__} {f[1]}" for f in FAULTS]
)
def test_a_planted_fault_fails_its_cell(tamper: Tamper, layout: str, seen_in: set[str]) -> None:
    cell = cell_of(layout, tamper)
    assert cell.failed
    assert not cell.passed
    assert seen_in <= {name for name in cell.differences if not cell.is_within(name)}, cell


OF_EXPERTS: list[tuple[Callable[[Decoder, Parallel], None], str, set[str]]] = [
    (dropped_token, "dp=2,ep=2", {"loss", "gradient", "parameter"}),
    (own_routing_sums, "cp=2", {"gradient"}),
    (expert_gradient_doubled, "dp=2,ep=2", {"norm", "gradient"}),
]


@pytest.mark.parametrize(
    ("tamper", "layout", "seen_in"), OF_EXPERTS, ids=[f[0].__name__ for f in OF_EXPERTS]
)
def test_a_planted_fault_of_experts_fails_its_cell(
    tamper: Tamper, layout: str, seen_in: set[str]
) -> None:
    cell = cell_of(layout, tamper, model="moe-debug")
    assert cell.failed
    assert seen_in <= {name for name in cell.differences if not cell.is_within(name)}, cell


def test_a_rank_that_skips_an_empty_exchange_fails_its_cell_within_the_time_out() -> None:
    cell = cell_of("dp=2,ep=2", skipped_empty_exchange, model="moe-debug", timeout_seconds=5.0)
    assert cell.failed
    assert cell.error is not None


def test_the_parameter_that_is_wrong_is_named() -> None:
    cell = cell_of("dp=2", one_gradient_halved)
    assert cell.worst_parameter == "layers.2.attention.output.weight"
    assert cell.max_gradient_difference == pytest.approx(0.5, rel=0.2)


def test_a_rank_that_dies_fails_its_cell_with_what_it_said() -> None:
    cell = cell_of("dp=2", broken_rank)
    assert cell.failed
    assert cell.error is not None
    assert "this rank is broken" in cell.error
