"""Routed experts: tokens sorted by expert, three grouped products, and their way back.

Legend: T tokens, D hidden, I width of an expert, E experts, K experts a token, R rows (T * K).

The dispatch seam decides how tokens reach experts: sorted here by default. It belongs to the module
that holds expert weights alone; the router is its sibling and not its child.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from herder.config.architecture import MlpConfig, MoeConfig
from herder.model.autograd import Function
from herder.model.axes import Axes
from herder.model.grouped_product import grouped_product
from herder.model.linear import Linear
from herder.model.mlp import ClampedSwiglu, Gating, Mlp, gated
from herder.model.router import Router
from herder.model.routing import LayerRouting, expert_counts

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows_RD sorted by expert, counts_E) -> rows_RD; rows past the sum of the counts give zeros."""
Beside = Callable[[], Tensor]
"""What a layer makes of its tokens besides: work for the time in which rows travel."""
Listener = Callable[[Literal["activation", "gradient"], Tensor], None]


class Moe(nn.Module):
    """The feed-forward of a routed layer: chosen experts, and the shared one where there is one.

    Source: DeepSeekMoE, arXiv:2401.06066, section 3; the shared expert's gate: Qwen2-MoE.
    """

    def __init__(
        self, hidden_size: int, config: MoeConfig, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.router = Router(hidden_size, config, device=device)
        self.experts = Experts(hidden_size, config, **made)
        width = config.shared_expert_intermediate_size
        self.shared: Mlp | None = None
        if width is not None:
            shared = MlpConfig(intermediate_size=width, activation=config.activation)
            self.shared = Mlp(hidden_size, shared, **made)
        has_gate = config.shared_expert_gate and width is not None
        self.shared_gate: Linear | None = None
        if has_gate:
            self.shared_gate = Linear(hidden_size, 1, axes=(None, "embed"), bias=False, **made)

    def forward(self, x_TD: Tensor, routing: LayerRouting | None = None) -> Tensor:
        """x_TD; of padding, only what the shared expert makes of it."""
        chosen_TK, weight_TK = self.router(x_TD, routing)
        beside = None if self.shared is None else partial(self._share, self.shared, x_TD)
        out_TD, shared_TD = self.experts(x_TD, chosen_TK, weight_TK, beside)
        return out_TD if shared_TD is None else out_TD + shared_TD

    def _share(self, shared: Mlp, x_TD: Tensor) -> Tensor:
        shared_TD = shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = torch.sigmoid(self.shared_gate(x_TD)) * shared_TD
        return shared_TD


class ExpertWeights(nn.Module):
    """One matrix of every expert, and its bias: a leaf that gives them, whatever shards it."""

    def __init__(
        self, num_experts: int, in_dim: int, out_dim: int, *, axes: Axes, bias: bool, **made: Any
    ) -> None:
        super().__init__()
        self.axes = axes
        self.weight = nn.Parameter(torch.empty(num_experts, out_dim, in_dim, **made))
        bias_EO = nn.Parameter(torch.empty(num_experts, out_dim, **made)) if bias else None
        self.register_parameter("bias", bias_EO)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """weight_EOI, bias_EO."""
        return self.weight, self.bias


class Experts(nn.Module):
    """Expert weights, and how tokens reach them."""

    def __init__(
        self, hidden_size: int, config: MoeConfig, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.weight_on_input = config.weight_on_input
        self.activation: Gating = (
            ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit)
            if config.activation == "clamped_swiglu"
            else config.activation
        )
        made = {"bias": config.expert_bias, "device": device, "dtype": dtype}
        width, inwards = config.expert_intermediate_size, ("experts", "hidden", "embed")
        sizes = config.num_experts, hidden_size, width
        self.gate = ExpertWeights(*sizes, axes=inwards, **made)
        self.up = ExpertWeights(*sizes, axes=inwards, **made)
        outwards = ("experts", "embed", "hidden")
        self.down = ExpertWeights(config.num_experts, width, hidden_size, axes=outwards, **made)
        self.dispatch = Dispatch()
        self._listeners: OrderedDict[int, tuple[int, Listener]] = OrderedDict()

    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor, beside: Beside | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted sum of each token's experts (with weight_on_input, of weighted tokens), and
        what `beside` gives."""
        there = self.compute, self.num_experts, beside
        if not self.weight_on_input:
            return self.dispatch(x_TD, chosen_TK, weight_TK, *there)
        x_TKD = (x_TD[:, None] * weight_TK[:, :, None]).to(x_TD.dtype)
        chosen_R1 = chosen_TK.reshape(-1, 1)
        ones_R1 = torch.ones_like(chosen_R1, dtype=weight_TK.dtype)
        out_RD, beside_TD = self.dispatch(x_TKD.flatten(0, 1), chosen_R1, ones_R1, *there)
        return out_RD.view_as(x_TKD).sum(1), beside_TD

    def compute(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Each row through its expert."""
        gate_RI = grouped_product(rows_RD, counts_E, *self.gate())
        up_RI = grouped_product(rows_RD, counts_E, *self.up())
        weight_EDI, bias_ED = self.down()

        def down(product_RI: Tensor) -> Tensor:
            return grouped_product(product_RI, counts_E, weight_EDI, bias_ED)

        out_RD = gated(gate_RI, up_RI, self.activation, down)
        if self._listeners:
            self._tell(out_RD, counts_E)
        return out_RD

    def watch(self, expert: int, listener: Listener) -> RemovableHandle:
        """Calls listener("activation", rows) with what this expert makes of its tokens (before
        weights), and listener("gradient", rows) with the gradient there; the handle removes it.
        Where experts are spread over ranks, the rank that has it calls.

        Breaks the graph of a compiled layer. Under recompute activations are told twice.
        """
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = (expert, listener)
        return handle

    @torch.compiler.disable
    def _tell(self, out_RD: Tensor, counts_E: Tensor) -> None:
        rows_of_each = counts_E.tolist()
        listeners, first = list(self._listeners.values()), self.dispatch.first_expert

        def tell(kind: Literal["activation", "gradient"], rows_RD: Tensor) -> None:
            chosen_RD = rows_RD[: sum(rows_of_each)]  # those after them are no expert's
            rows = dict(enumerate(chosen_RD.split(rows_of_each), first))
            for expert, listener in listeners:
                if expert in rows:
                    listener(kind, rows[expert])

        tell("activation", out_RD.detach())
        if out_RD.requires_grad:
            out_RD.register_hook(partial(tell, "gradient"))


class Dispatch:
    """How tokens reach experts, all of which are here."""

    first_expert = 0
    """Of those that are here."""

    def __call__(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weight_TK: Tensor,
        compute: Compute,
        num_experts: int,
        beside: Beside | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """sum_k weight_TK * expert_k(x_TD), and what `beside` gives. The choice `num_experts` is
        none.

        Rows come back to where their token is before they are summed, so that the order of tokens
        has no say in the sums.
        """
        sort = SortedChoices(chosen_TK)
        out_RD = compute(sort.rows(x_TD), expert_counts(chosen_TK, num_experts))
        return sort.summed(out_RD, weight_TK), None if beside is None else beside()


class SortedChoices:
    """Rows by expert, and where each token's are."""

    def __init__(self, chosen_TK: Tensor) -> None:
        self._order_R = chosen_TK.flatten().argsort(stable=True)
        row_R = torch.arange(self._order_R.shape[0], device=chosen_TK.device)
        place_R = torch.empty_like(row_R).scatter(0, self._order_R, row_R)
        self._place_TK = place_R.view_as(chosen_TK)

    def rows(self, x_TD: Tensor) -> Tensor:
        """rows_RD of the tokens, those of the first expert first."""
        return _Sorted.apply(x_TD, self._order_R, self._place_TK)

    def summed(self, rows_RD: Tensor, weight_TK: Tensor) -> Tensor:
        """out_TD: each token's rows times their weights."""
        return _Summed.apply(rows_RD, weight_TK, self._order_R, self._place_TK)


class _Sorted(Function):
    """Row r is the token of choice order_R[r]."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return x_TD.index_select(0, order_R // place_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (place_TK,) = ctx.saved_tensors
        return _sum_choices(grad_RD, place_TK, None), None, None


class _Summed(Function):
    """Each token's rows times their weights, summed in fp32."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weight_TK: Tensor, order_R: Tensor, place_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, weight_TK, order_R, place_TK)
        return _sum_choices(rows_RD, place_TK, weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weight_TK, order_R, place_TK = ctx.saved_tensors
        grad_RD = grad_TD.index_select(0, order_R // place_TK.shape[1])
        rows_grad = weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = (grad_RD.float() * rows_RD).sum(-1)[place_TK]
        if ctx.needs_input_grad[0]:
            rows_grad = (grad_RD * weight_TK.flatten()[order_R, None]).to(rows_RD.dtype)
        return rows_grad, weight_grad, None, None


def _sum_choices(rows_RD: Tensor, place_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """out_TD in the rows' dtype, summed in fp32."""
    total_TD = None
    for k, place_T in enumerate(place_TK.unbind(1)):
        row_TD = rows_RD.index_select(0, place_T).float()
        if weight_TK is not None:
            row_TD.mul_(weight_TK[:, k, None])
        total_TD = row_TD if total_TD is None else total_TD.add_(row_TD)
    assert total_TD is not None, "a token without choices"
    return total_TD.to(rows_RD.dtype)
