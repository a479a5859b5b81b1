"""Experts spread over ranks: rows that travel, worked out by hand, and routers that are unfair."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from herder.config.architecture import ArchitectureConfig
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.experts import Moe
from herder.model.router import Router
from herder.parallel.expert import ExpertDispatch, apply_expert_parallel
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part
from herder.plan.training import TrainingPlan
from herder.train.verify import verify
from herder.train.verify_layouts import parse_layouts
from tests.tiny import MOE, micro_batches, plan_on_cpus, planned_trainer, tiny_model

TOKENS = 32


def dispatched_by_hand(_: None) -> tuple[Tensor, Tensor, list[int]]:
    """Two ranks of two experts each; expert e makes 10^e of a row. (out, gradient, rows here)."""
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    x_TD = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]][rank], requires_grad=True)
    # 4 is no expert: padding. Rank 1 sends nothing to expert 2, and nobody sends to expert 1.
    chosen_TK = torch.tensor([[[0, 3], [2, 0], [4, 4]], [[3, 0], [0, 3], [3, 4]]][rank])
    weight_TK = torch.tensor([[0.5, 0.25], [1.0, 2.0], [1.0, 1.0]])
    rows_of_each = list[int]()

    def compute(rows_RD: Tensor, counts_L: Tensor) -> Tensor:
        rows_of_each.extend(counts_L.tolist())
        factors = torch.tensor([1.0, 10.0]) * 100**rank
        return rows_RD * factors.repeat_interleave(counts_L)[:, None]

    out_TD, _ = ExpertDispatch(group, num_experts=4)(x_TD, chosen_TK, weight_TK, compute, 4)
    (grad_TD,) = torch.autograd.grad(out_TD.sum(), x_TD)
    return out_TD.detach(), grad_TD, rows_of_each


def test_four_experts_on_two_ranks_make_of_six_tokens_what_a_hand_does() -> None:
    (first, first_grad, first_rows), (second, second_grad, second_rows) = run_on_ranks(
        dispatched_by_hand, 2, None
    )
    # 0.5 * 1 * 1 + 0.25 * 1000 * 1; 1 * 100 * 2 + 2 * 1 * 2; padding
    assert first.flatten().tolist() == [250.5, 204.0, 0.0]
    # 0.5 * 1000 * 4 + 0.25 * 1 * 4; 1 * 1 * 5 + 2 * 1000 * 5; 1 * 1000 * 6, and no second choice
    assert second.flatten().tolist() == [2001.0, 10005.0, 6000.0]
    assert first_grad.flatten().tolist() == [250.5, 102.0, 0.0]
    assert second_grad.flatten().tolist() == [500.25, 2001.0, 1000.0]
    assert first_rows == [4, 0], "experts 0 and 1"
    assert second_rows == [1, 4], "experts 2 and 3"


class Bytes(TorchDispatchMode):
    """Of floating-point rows that are sent: counts of rows are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "all_to_all_single" in func.__name__ and args[0].is_floating_point():
            self.sent += args[0].nbytes
        return func(*args, **(kwargs or {}))


def bytes_sent(sizes: list[tuple[int, int]]) -> list[int]:
    """Forward and backward, for pairs of (tokens, experts)."""
    group = dist.group.WORLD
    assert group is not None
    told = []
    for num_tokens, num_experts in sizes:
        generator = torch.Generator().manual_seed(group.rank())
        x_TD = torch.randn(num_tokens, 16, generator=generator, requires_grad=True)
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        weight_TK, chosen_TK = scores.topk(2)
        with Bytes() as count:
            dispatch = ExpertDispatch(group, num_experts=num_experts)
            out_TD, _ = dispatch(x_TD, chosen_TK, weight_TK, lambda x, _: 2 * x, num_experts)
            out_TD.sum().backward()
        told.append(count.sent)
    return told


def test_bytes_are_those_of_the_rows_however_many_experts_there_are() -> None:
    sizes = [(20, 4), (40, 4), (40, 32)]
    there_and_back = [2 * 2 * num_tokens * 2 * 16 * 4 for num_tokens, _ in sizes]  # both passes
    told = run_on_ranks(bytes_sent, 2, sizes)
    assert [sum(each) for each in zip(*told, strict=True)] == [2 * each for each in there_and_back]


def train_unfairly(model: ArchitectureConfig, plan: TrainingPlan) -> tuple[list[float], list[int]]:
    """Losses, and how often each expert was chosen, where one of them is everyone's choice."""
    run = planned_trainer(model, plan, learning_rate=3e-3)
    for module in run.decoder.modules():
        if isinstance(module, Router):
            module.correction_bias[0] = 1e4
    results = [run.step(micro_batches(0, 4, TOKENS)) for _ in range(4)]
    routing = results[-1].routing
    assert routing is not None
    return [each.loss for each in results], routing.counts_LE.sum(0).tolist()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_router_that_sends_everything_to_one_expert_trains(zero_stage: int) -> None:
    given = {"num_experts_per_token": 1, "scoring": "sigmoid", "correction_bias": True}
    model = tiny_model("mm", moe=MOE.model_copy(update=given))
    layout = {"expert_parallel_size": 4, "zero_stage": zero_stage}
    plan = plan_on_cpus(model, 4, layout, sequence_length=TOKENS, global_batch_tokens=4 * TOKENS)
    for losses, counts in run_on_ranks(train_unfairly, 4, model, plan):
        assert counts == [2 * 4 * TOKENS, 0, 0, 0]
        assert losses[-1] < 0.95 * losses[0]


class Names(TorchDispatchMode):
    """Of what is computed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name in {"mm", "silu", "wait_tensor", "all_to_all_single"}:
            self.told.append(name)
        return func(*args, **(kwargs or {}))


def routed_layer(shared_width: int | None = 48) -> Moe:
    """The routed layer of a tiny model, with its experts spread over all ranks."""
    moe = MOE.model_copy(update={"shared_expert_intermediate_size": shared_width})
    decoder = build_decoder(tiny_model("m", moe=moe))
    group = dist.group.WORLD
    assert group is not None
    apply_expert_parallel(decoder, init_device_mesh("cpu", (group.size(),), mesh_dim_names=("ep",)))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=3, place=copy_part)
    layer = decoder.layers.get_submodule("0.feed_forward")
    assert isinstance(layer, Moe)
    return layer


def order_of_work() -> tuple[list[str], list[str]]:
    """Forward and backward of a routed layer with a shared expert."""
    layer, x_TD = routed_layer(), torch.randn(24, 32, requires_grad=True)
    with Names() as forward:
        out_TD = layer(x_TD)
    with Names() as backward:
        out_TD.sum().backward()
    return forward.told, backward.told


def between(names: list[str], exchange: int) -> list[str]:
    """What is done while the exchange of that number is on its way."""
    start = [place for place, name in enumerate(names) if name == "all_to_all_single"][exchange]
    end = names.index("wait_tensor", start)
    return names[start + 1 : end]


def test_the_shared_expert_computes_while_rows_and_their_gradients_travel() -> None:
    for forward, backward in run_on_ranks(order_of_work, 2):
        assert forward.count("all_to_all_single") == backward.count("all_to_all_single") == 2
        assert between(forward, 0).count("mm") == 3, forward
        assert between(forward, 1) == []
        assert between(backward, 0) == []
        assert between(backward, 1).count("mm") >= 6, backward


def rows_alive_while_experts_compute() -> tuple[int, int]:
    """(bytes of tensors that were made and are alive when experts have got their rows, and bytes
    of these rows), where nothing has to be kept for a backward."""
    layer, seen = routed_layer(shared_width=None), list[tuple[int, int]]()
    made = Made()

    def compute(rows_RD: Tensor, _counts: Tensor) -> Tensor:
        seen.append((made.num_bytes, rows_RD.nbytes))
        return rows_RD

    layer.experts.compute = compute  # type: ignore[method-assign]
    with torch.no_grad(), made:
        layer(torch.randn(4096, 32))
    return seen[0]


class Made(TorchDispatchMode):
    """Bytes of storages that were made under it and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}

    @property
    def num_bytes(self) -> int:
        alive = {key: each() for key, each in self._storages.items()}
        return sum(each.nbytes() for each in alive.values() if each is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return out


def test_what_was_sent_is_gone_before_experts_compute() -> None:
    for alive, rows in run_on_ranks(rows_alive_while_experts_compute, 2):
        assert rows <= alive < 2.2 * rows


def watched(_: None) -> dict[int, list[int]]:
    """By expert, the numbers of rows that listeners on this rank were told of."""
    layer, told = routed_layer(), dict[int, list[int]]()
    for expert in range(MOE.num_experts):
        layer.experts.watch(
            expert, lambda _kind, rows, e=expert: told.setdefault(e, []).append(len(rows))
        )
    layer(torch.randn(24, 32)).sum().backward()
    return told


def test_an_expert_is_watched_by_its_own_number_on_the_rank_that_has_it() -> None:
    first, second = run_on_ranks(watched, 2, None)
    assert (set(first), set(second)) == ({0, 1}, {2, 3})
    assert sum(rows[0] for told in (first, second) for rows in told.values()) == 2 * 24 * 2


def train_with_little_room(model: ArchitectureConfig, plan: TrainingPlan) -> tuple[float, int]:
    run = planned_trainer(model, plan)
    result = run.step(micro_batches(0, 4, TOKENS, pads=True))
    assert result.routing is not None
    return result.loss, int(result.routing.dropped_L.sum())


def test_capacity_drops_the_same_choices_in_every_layout() -> None:
    model = tiny_model("mm", moe=MOE.model_copy(update={"capacity_factor": 0.8}))
    sizes = {"sequence_length": TOKENS, "global_batch_tokens": 4 * TOKENS}
    alone = train_with_little_room(model, plan_on_cpus(model, **sizes))
    assert alone[1] > 0.2 * 2 * 4 * TOKENS * 2 * 0.8
    layout = {"expert_parallel_size": 2, "context_parallel_size": 2, "context_method": "ring"}
    plan = plan_on_cpus(model, 4, layout, **sizes)
    for loss, dropped in run_on_ranks(train_with_little_room, 4, model, plan):
        assert dropped == alone[1]
        assert loss == pytest.approx(alone[0], rel=1e-6)
    report = verify(model, parse_layouts(["cp=2", "tp=2,pp=2"]), model="tiny", num_steps=3)
    assert report.problem is None
