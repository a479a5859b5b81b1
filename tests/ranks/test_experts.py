"""Experts spread over ranks: rows that travel, worked out by hand, and routers that are unfair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from herder.config.architecture import ArchitectureConfig
from herder.model.router import Router
from herder.parallel.expert import ExpertDispatch
from herder.parallel.ranks import run_on_ranks
from herder.plan.training import TrainingPlan
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

    out_TD = ExpertDispatch(group)(x_TD, chosen_TK, weight_TK, compute, 4)
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
            dispatch = ExpertDispatch(group)
            dispatch(x_TD, chosen_TK, weight_TK, lambda x, _: 2 * x, num_experts).sum().backward()
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
