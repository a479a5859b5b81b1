"""What training does with routers: noise, auxiliary losses, bias updates, and what is told of them.

Owns the routing terms of a step and their sums over micro-batches and steps. How tokens are routed
is the model's affair, how the numbers are shown the sinks'.

Legend: T tokens, L routed layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from herder.config.architecture import ArchitectureConfig, MoeConfig
from herder.data.batch import MicroBatch
from herder.model.decoder import Decoder
from herder.model.routing import (
    ExpertCapacity,
    RouterNoise,
    Routing,
    routing_losses,
    routing_sums,
)
from herder.observe.events import RouterStats
from herder.parallel.apply import Parallel
from herder.parallel.context import WHOLE_CONTEXT, Context

_DEAD_AFTER_EVENTS = 5
_DOMINANT_SHARE = 0.9


def routed_layers(config: ArchitectureConfig) -> tuple[int, ...]:
    """Indices of the layers that have a router; none in a dense model."""
    layers = enumerate(config.layers)
    return tuple(index for index, layer in layers if layer.feed_forward == "routed")


def router_noise(moe: MoeConfig | None, *, seed: int, step: int) -> RouterNoise | None:
    """The noise of training step `step`, counted from 0: it decays to none in a straight line."""
    if moe is None or moe.noise is None or step >= moe.noise.decay_steps:
        return None
    return RouterNoise(seed, step, moe.noise.std * (1 - step / moe.noise.decay_steps))


def routing_of(
    config: ArchitectureConfig,
    batch: MicroBatch,
    noise: RouterNoise | None = None,
    context: Context = WHOLE_CONTEXT,
    *,
    is_training: bool = False,
) -> Routing | None:
    """The routing of this rank's part of a micro-batch on its device; None for a dense model.

    is_training: whether experts' capacity is limited where the record says so.
    """
    if not routed_layers(config):
        return None
    tokens = range(batch.first_token, batch.first_token + batch.num_tokens)
    token_T = torch.arange(tokens.start, tokens.stop, device=batch.real_T.device)
    capacity = _expert_capacity(config.moe, batch, context) if is_training else None
    return Routing(context.part(batch.real_T), context.part(token_T), noise, capacity)


def _expert_capacity(
    moe: MoeConfig | None, batch: MicroBatch, context: Context
) -> ExpertCapacity | None:
    if moe is None or moe.capacity_factor is None:
        return None
    share = batch.num_real_tokens * moe.num_experts_per_token / moe.num_experts
    # A tensor: a compiled layer must not see numbers that change with the micro-batch.
    choices = torch.tensor(math.ceil(moe.capacity_factor * share), device=batch.real_T.device)
    return ExpertCapacity(choices, whole=context.whole, part=context.part)


@dataclass(frozen=True, eq=False)
class RoutingTotals:
    """Sums over the real tokens of some micro-batches; tensors are on the model's device."""

    layers: tuple[int, ...]
    num_tokens: int
    counts_LE: Tensor
    """int64: how often each expert was chosen."""
    entropy_sum_L: Tensor
    dropped_L: Tensor
    """int64: choices that found no room."""

    def __add__(self, other: RoutingTotals) -> RoutingTotals:
        return RoutingTotals(
            self.layers,
            self.num_tokens + other.num_tokens,
            self.counts_LE + other.counts_LE,
            self.entropy_sum_L + other.entropy_sum_L,
            self.dropped_L + other.dropped_L,
        )


class StepRouters:
    """The routing terms of one step's loss, each micro-batch weighted by its share of real tokens.

    Which tokens share a micro-batch is fixed by the data, and so are the terms: the loss of a
    micro-batch is linear neither in its tokens nor in its layers. Where pipeline stages have a part
    of the layers each, their sums travel with the micro-batch, and the last stage has the loss.
    """

    def __init__(
        self, config: ArchitectureConfig, *, num_real_tokens: Tensor, num_copies: int = 1
    ) -> None:
        """num_real_tokens: of the step, on all ranks. num_copies: ranks that each compute the same
        terms, and of whose gradients the sum is taken."""
        assert config.moe is not None, "a dense model has no routers"
        self._num_copies = num_copies
        self._moe = config.moe
        self._num_real_tokens = num_real_tokens
        self._layers = routed_layers(config)
        made = {"device": num_real_tokens.device}
        shape = len(self._layers), self._moe.num_experts
        self._counts_LE = torch.zeros(shape, dtype=torch.int64, **made)
        self._entropy_sum_L = torch.zeros(shape[0], dtype=torch.float32, **made)
        self._dropped_L = torch.zeros(shape[0], dtype=torch.int64, **made)
        self._losses = torch.zeros(2, dtype=torch.float32, **made)

    def watch(self, routing: Routing) -> Tensor | None:
        """The `routing_sums` of the layers that were forwarded here, if any, and counts them."""
        for layer, record in routing.records.items():
            place = self._layers.index(layer)
            if record.counts_E is not None:
                self._counts_LE[place] += record.counts_E
            self._entropy_sum_L[place] += record.entropy_sum
            self._dropped_L[place] += record.num_dropped
        return routing_sums(routing.records) if routing.records else None

    def loss(self, sums: Tensor, *, num_real_tokens: int) -> Tensor:
        """What a micro-batch adds to the step's loss, by the `routing_sums` of all layers."""
        moe, losses = self._moe, routing_losses(sums)
        losses = losses * (num_real_tokens / self._num_real_tokens)
        self._losses += losses.detach()
        coefficients = (moe.aux_loss_coefficient, moe.z_loss_coefficient)
        return (losses * losses.new_tensor(coefficients)).sum() / self._num_copies

    @property
    def losses(self) -> Tensor:
        """[2]: the step's load-balancing loss and z-loss before their coefficients, as far as this
        rank has them."""
        return self._losses

    def totals_over(self, parallel: Parallel) -> RoutingTotals:
        """The sums over the step's micro-batches and layers on all ranks: a collective."""
        own = self._counts_LE.flatten(), self._entropy_sum_L, self._dropped_L
        sums = torch.cat([each.double() for each in own])
        sums = parallel.sum_over_parts(parallel.sum_over_data(sums))
        counts_LE, entropy_sum_L, dropped_L = sums.split([len(each) for each in own])
        return RoutingTotals(
            layers=self._layers,
            num_tokens=round(self._num_real_tokens.item()),
            counts_LE=counts_LE.view_as(self._counts_LE).long(),
            entropy_sum_L=entropy_sum_L.to(self._entropy_sum_L.dtype),
            dropped_L=dropped_L.long(),
        )


@torch.no_grad()
def update_correction_biases(decoder: Decoder, totals: RoutingTotals) -> None:
    """Move each expert's bias by a fixed amount: up where it was chosen less than the mean.

    Nothing happens where the record has no such bias or a rate of 0, nor to layers of another
    pipeline stage. Source: arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, 2.1.2.
    """
    moe = decoder.config.moe
    if moe is None or not moe.correction_bias or not moe.correction_bias_update_rate:
        return
    for layer, counts_E in zip(totals.layers, totals.counts_LE.float(), strict=True):
        if str(layer) not in decoder.layers:
            continue
        bias_E = decoder.layers.get_submodule(f"{layer}.feed_forward.router").correction_bias
        assert isinstance(bias_E, Tensor), f"layer {layer} has no correction_bias"
        bias_E += moe.correction_bias_update_rate * torch.sign(counts_E.mean() - counts_E)


class RouterWatch:
    """What routers did since it was last told, over as many steps as that is."""

    def __init__(self) -> None:
        self._totals: RoutingTotals | None = None
        self._idle_events = dict[tuple[int, int], int]()

    def add(self, totals: RoutingTotals | None) -> None:
        """Count one step. Nothing leaves the device."""
        if totals is not None:
            self._totals = totals if self._totals is None else self._totals + totals

    def tell(self, step: int) -> list[RouterStats]:
        """One event a routed layer, then counting starts anew; none for a dense model."""
        totals, self._totals = self._totals, None
        if totals is None:
            return []
        selections = totals.counts_LE.tolist()
        entropies = (totals.entropy_sum_L / max(totals.num_tokens, 1)).tolist()
        told = zip(totals.layers, selections, entropies, totals.dropped_L.tolist(), strict=True)
        return [
            self._stats(step, layer, totals.num_tokens, counts, entropy, dropped)
            for layer, counts, entropy, dropped in told
        ]

    def _stats(
        self,
        step: int,
        layer: int,
        num_tokens: int,
        counts: Sequence[int],
        entropy: float,
        num_dropped: int,
    ) -> RouterStats:
        idle = self._idle_events
        for expert, count in enumerate(counts):
            idle[layer, expert] = 0 if count else idle.get((layer, expert), 0) + 1
        experts, mean = range(len(counts)), sum(counts) / len(counts)
        most = max(_DOMINANT_SHARE * num_tokens, mean)
        return RouterStats(
            step=step,
            layer=layer,
            tokens=num_tokens,
            selections=tuple(counts),
            imbalance=max(counts) / (mean or 1.0),
            entropy=entropy,
            max_entropy=math.log(len(counts)),
            dead=tuple(each for each in experts if idle[layer, each] >= _DEAD_AFTER_EVENTS),
            dominant=tuple(each for each in experts if counts[each] > most),
            dropped_tokens=num_dropped,
        )
