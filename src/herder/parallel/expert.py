"""Expert parallelism: each rank has some of the experts, and rows travel to them and back.

The other implementation of the dispatch seam: tokens are sorted by expert as ever, then each rank's
rows go to the ranks that hold their experts, and what those make of them comes back. A rank without
rows takes part all the same: others wait for it. Bytes sent are those of the rows, however many
experts there are.

    rows by expert on each rank -> all-to-all -> rows by rank and expert -> by expert -> products
    -> by rank and expert -> all-to-all -> rows by expert on each rank

Source: GShard, arXiv:2006.16668, section 3.2; without capacity: MegaBlocks, arXiv:2211.15841.

Legend: T tokens, K experts a token, D hidden, R rows, S ranks, E experts, L of them on a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from herder.model.autograd import Function
from herder.model.decoder import Decoder
from herder.model.experts import Beside, Compute, Dispatch, Experts, SortedChoices
from herder.model.routing import expert_counts
from herder.parallel.collectives import RowExchange
from herder.parallel.leaves import Leaf
from herder.parallel.rules import leaf_axes


def apply_expert_parallel(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Give every rank its experts of each layer. mesh: of ep, or of ep and tp, which then splits
    each expert too; tensor parallelism is applied after this and leaves experts alone.
    """
    group = mesh.get_group("ep")
    for experts in decoder.modules():
        if isinstance(experts, Experts):
            experts.dispatch = ExpertDispatch(group, num_experts=experts.num_experts)
            for module in experts.children():
                axes = leaf_axes(module)
                assert axes is not None, "weights of experts name their axes"
                leaf = Leaf(module, axes, mesh)
                leaf.split({})
                leaf.register()


class ExpertDispatch(Dispatch):
    """Brings rows to the ranks of their experts, and back."""

    def __init__(self, group: dist.ProcessGroup, *, num_experts: int) -> None:
        self._group = group
        self.first_expert = group.rank() * (num_experts // group.size())

    @torch.compiler.disable
    def __call__(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weight_TK: Tensor,
        compute: Compute,
        num_experts: int,
        beside: Beside | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As Dispatch does. `beside` runs while rows travel, and its backward while their gradients
        do. What was sent is released before experts compute.
        """
        sent_SL = expert_counts(chosen_TK, num_experts).view(self._group.size(), -1)
        got_SL = torch.empty_like(sent_SL)
        dist.all_to_all_single(got_SL, sent_SL, group=self._group)
        sizes = _Sizes(torch.stack([sent_SL.sum(1), got_SL.sum(1)]))
        sort = SortedChoices(chosen_TK)
        rows_RD = sort.rows(x_TD)
        sent, got = sizes.on_host()
        num_rows, num_chosen = len(rows_RD), sum(sent)
        travelling = RowExchange(rows_RD[:num_chosen], sent, got, self._group)
        beside_TD = None if beside is None else beside()
        here_RD = travelling.arrived()
        del rows_RD, travelling
        order_R, place_R = _order_by_expert(got_SL, num_rows=sum(got))
        here_RD = _Permuted.apply(here_RD, order_R, place_R)
        here_RD = compute(here_RD, got_SL.sum(0))
        here_RD = _Permuted.apply(here_RD, place_R, order_R)
        back_RD = RowExchange(here_RD, got, sent, self._group).arrived()
        del here_RD
        if num_chosen < num_rows:
            back_RD = pad(back_RD, (0, 0, 0, num_rows - num_chosen))
        return sort.summed(back_RD, weight_TK), beside_TD


class _Sizes:
    """Sizes of what is sent and received, which the host must know, on their way to it.

    What a GPU is given between the start and `on_host` runs while the host waits: it waits for the
    copy alone, not for the stream. Pinned memory comes from torch's cache of it.
    """

    def __init__(self, sizes: Tensor) -> None:
        self._sizes, self._copied = sizes, None
        if sizes.device.type != "cpu":
            self._sizes = torch.empty_like(sizes, device="cpu", pin_memory=True)
            self._sizes.copy_(sizes, non_blocking=True)
            self._copied = torch.Event(sizes.device)
            self._copied.record(torch.accelerator.current_stream(sizes.device))

    def on_host(self) -> list[list[int]]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._sizes.tolist()


def _order_by_expert(got_SL: Tensor, *, num_rows: int) -> tuple[Tensor, Tensor]:
    """(order_R, place_R): rows that are sorted by rank and expert, by expert, and the way back."""
    expert_R = torch.arange(got_SL.numel(), device=got_SL.device) % got_SL.shape[1]
    expert_R = expert_R.repeat_interleave(got_SL.flatten(), output_size=num_rows)
    order_R = expert_R.argsort(stable=True)
    return order_R, order_R.argsort()


class _Permuted(Function):
    """Row r is row order_R[r] of what was given; place_R is the way back."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (place_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, place_R), None, None
