"""Collectives with gradients, on rows: what crosses ranks within one forward and backward.

Every rank's gradient of a gathered tensor is a part of the sum, which is why gathering and
scattering are each other's backward. Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.

Written on the functional operators, so that the compiler sees them. Legend: T rows, S ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from herder.model.autograd import Function

_ops = torch.ops._c10d_functional


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S * T, ...] of every rank's [T, ...], in order of ranks; gradients are summed."""
    return _GatherRows.apply(x, group.size(), group.group_name)


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [T / S, ...] of the sum of all ranks' [T, ...]; gradients are gathered.

    T must be a multiple of S: gloo would end the process.
    """
    size = group.size()
    assert x.shape[0] % size == 0, f"{x.shape[0]} rows cannot be split over {size} ranks"
    return _ScatterSum.apply(x, size, group.group_name)


def gather_dims(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, S * D] of every rank's [T, D]; gradients are summed."""
    rows = gather_rows(x[None], group)
    return rows.movedim(0, 1).flatten(1)


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...] of what every rank has for this one, given what this one has for every rank.

    Gradients go the same way back.
    """
    return _Exchange.apply(x, group.size(), group.group_name)


class RowExchange:
    """[sum(got), ...] of [sum(sent), ...], on its way: the first sent[0] rows go to the first rank,
    and so on; the first got[0] come from it.

    Gradients go the same way back, and are on it while the backward runs of what was computed
    between the start and `arrived`.
    """

    def __init__(
        self, x: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._way = list(sent), list(got), group.group_name
        self._on_the_way = list[Tensor]()
        self._sent = _Sent.apply(x, self._on_the_way, *self._way)

    def arrived(self) -> Tensor:
        """The rows, waited for. To be called once."""
        return _Arrived.apply(self._sent, self._on_the_way, *self._way)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x on every rank; so are gradients."""
    return _SumOver.apply(x, group.group_name)


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return _gathered(x, size, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(grad, *ctx.group), None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return _scattered(x, size, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, *ctx.group), None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return _exchanged(x, size, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, *ctx.group), None, None


class _Sent(Function):
    """Gives what was sent, whose gradient is on its way when it comes back here."""

    @staticmethod
    def forward(
        _ctx: Any, x: Tensor, on_the_way: list[Tensor], sent: list[int], got: list[int], name: str
    ) -> Tensor:
        on_the_way.append(_ops.all_to_all_single(x.contiguous(), got, sent, name))
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _ops.wait_tensor(grad), None, None, None, None


class _Arrived(Function):
    @staticmethod
    def forward(
        ctx: Any, _x: Tensor, on_the_way: list[Tensor], sent: list[int], got: list[int], name: str
    ) -> Tensor:
        ctx.way = sent, got, name
        return _ops.wait_tensor(on_the_way.pop())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, got, name = ctx.way
        back = _ops.all_to_all_single(grad.contiguous(), sent, got, name)
        return back, None, None, None, None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _ops.wait_tensor(_ops.all_reduce(grad.contiguous(), "sum", ctx.name)), None


def _exchanged(x: Tensor, size: int, name: str) -> Tensor:
    rows = [x.shape[0] // size] * size
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), rows, rows, name))


def _gathered(x: Tensor, size: int, name: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, name))


def _scattered(x: Tensor, size: int, name: str) -> Tensor:
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, name))
