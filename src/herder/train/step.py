"""One optimizer step: micro-batches in, updated parameters and the step's numbers out.

Knows one model, one optimizer and one step; not how many steps there are, where batches come from
or who listens. The loss of held-out text goes through the same forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from herder.data.batch import MicroBatch
from herder.model.decoder import Decoder
from herder.model.readout import LossReadout
from herder.model.routing import RouterNoise, Routing
from herder.parallel.apply import ONE_PROCESS, Parallel
from herder.parallel.seat import note_phase
from herder.parallel.shards import held_tensor
from herder.train.routers import (
    RoutingTotals,
    StepRouters,
    routed_layers,
    routing_of,
    update_correction_biases,
)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step reports."""

    loss: float
    """Cross-entropy alone, mean over the weights of all micro-batches, in nats."""
    gradient_norm: float
    """Of the whole gradient before clipping."""
    weight: float
    """Sum of the weights: tokens with a target."""
    aux_loss: float | None = None
    """Load-balancing loss before its coefficient; None for a dense model, like z_loss."""
    z_loss: float | None = None
    routing: RoutingTotals | None = None
    """What routers chose in this step; None for a dense model."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient of a step is not finite; parameters and optimizer are as before."""

    def __init__(self, result: StepResult) -> None:
        super().__init__(f"loss {result.loss}, gradient norm {result.gradient_norm}")
        self.result = result


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How the forward and the update of a step are computed."""

    device: torch.device
    precision: Literal["fp32", "bf16"]
    """bf16: fp32 parameters, products in bf16 under autocast."""
    loss_chunk_tokens: int
    clip_norm: float
    parallel: Parallel = ONE_PROCESS


def train_step(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    settings: StepSettings,
    *,
    noise: RouterNoise | None = None,
) -> StepResult:
    """Accumulate gradients over this rank's micro-batches, clip, and update once.

    Every micro-batch's summed loss is divided by the weight of all of them on all ranks, so that a
    token counts the same wherever it was packed; routers add terms of their own. One transfer from
    the device: losses and norm together, which must be seen before the update, and which all ranks
    see alike. Raises NonFiniteError instead of updating.
    """
    optimizer.zero_grad(set_to_none=True)
    parallel, parameters = settings.parallel, list(decoder.parameters())
    weight, num_real_tokens = _step_tokens(micro_batches, settings)
    routers, num_router_copies = None, parallel.num_copies * parallel.context.num_ranks
    if routed_layers(decoder.config):
        routers = StepRouters(
            decoder.config, num_real_tokens=num_real_tokens, num_copies=num_router_copies
        )
    losses = LossSum(settings.device)
    works = [StepWork(batch, settings, weight, losses, routers, noise) for batch in micro_batches]
    _accumulate(decoder, works, parallel)
    numbers = losses.total[None] / parallel.num_copies
    if routers is not None:
        numbers = torch.cat([numbers, routers.losses / num_router_copies])
    note_phase("gradient norm")
    squared_norm = parallel.squared_norm(parameters)[None]
    told = parallel.sum_over_all(torch.cat([numbers, squared_norm]).double())
    weight_value, loss_value, *routing_values, square = [weight.item(), *told.tolist()]
    norm_value = math.sqrt(square)
    aux_loss, z_loss = routing_values or (None, None)
    result = StepResult(
        loss=loss_value,
        gradient_norm=norm_value,
        weight=weight_value,
        aux_loss=aux_loss,
        z_loss=z_loss,
        routing=None if routers is None else routers.totals_over(parallel),
    )
    if not (_is_finite(loss_value) and _is_finite(norm_value)):
        raise NonFiniteError(result)
    if norm_value > settings.clip_norm:
        _scale_gradients(parameters, settings.clip_norm / norm_value)
    note_phase("update")
    optimizer.step()
    if result.routing is not None:
        update_correction_biases(decoder, result.routing)
    return result


def _accumulate(decoder: Decoder, works: Sequence[StepWork], parallel: Parallel) -> None:
    """Forward and backward of all micro-batches; gradients are sums over all ranks then."""
    if parallel.pipeline is not None:
        parallel.pipeline.run(works)
        return
    for number, work in enumerate(works, 1):
        parallel.sync.expect_last(is_last=number == len(works))
        loss, _ = work.forward(decoder, work.tokens_T, None)
        loss.backward()
    note_phase("gradient reduction")
    parallel.sync.finish()


class LossSum:
    """What the last pipeline stage has of the losses of some micro-batches; zero elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float32, device=device)

    def add(self, loss: Tensor) -> None:
        self.total += loss.detach()


class StepWork:
    """One micro-batch of a step on its way through the model, or through the stages of it."""

    def __init__(
        self,
        batch: MicroBatch,
        settings: StepSettings,
        weight: Tensor,
        losses: LossSum,
        routers: StepRouters | None,
        noise: RouterNoise | None,
    ) -> None:
        self._batch = batch
        self._settings = settings
        self._weight = weight
        self._losses = losses
        self._routers = routers
        self._noise = noise

    @property
    def tokens_T(self) -> Tensor:
        """What goes into the first stage."""
        tokens_T = self._batch.tokens_T.to(self._settings.device)
        return self._settings.parallel.context.part(tokens_T)

    def forward(
        self, decoder: Decoder, x: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A stage's hidden states, and the `routing_sums` of all layers so far; of the last stage,
        what is to be differentiated."""
        batch = self._batch.to(x.device)
        context = self._settings.parallel.context
        routing = routing_of(decoder.config, batch, self._noise, context, is_training=True)
        out = summed_loss(decoder, batch, self._settings, routing, x=x)
        if self._routers is not None and routing is not None:
            own = self._routers.watch(routing)
            if own is not None:
                carried = own if carried is None else carried + own
        if decoder.head is None:
            return out, carried
        loss = out / self._weight
        self._losses.add(loss)
        if self._routers is not None and carried is not None:
            carried = context.total(carried)
            loss = loss + self._routers.loss(carried, num_real_tokens=self._batch.num_real_tokens)
        return loss, None


class HeldOutWork:
    """One micro-batch of held-out text on its way through the model, or through the stages."""

    def __init__(self, batch: MicroBatch, settings: StepSettings, losses: LossSum) -> None:
        self._batch = batch
        self._settings = settings
        self._losses = losses

    @property
    def tokens_T(self) -> Tensor:
        """What goes into the first stage."""
        tokens_T = self._batch.tokens_T.to(self._settings.device)
        return self._settings.parallel.context.part(tokens_T)

    def forward(
        self, decoder: Decoder, x: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A stage's hidden states; of the last one, the summed loss."""
        batch = self._batch.to(x.device)
        routing = routing_of(decoder.config, batch, context=self._settings.parallel.context)
        out = summed_loss(decoder, batch, self._settings, routing, x=x)
        if decoder.head is not None:
            self._losses.add(out)
        return out, carried


def summed_loss(
    decoder: Decoder,
    batch: MicroBatch,
    settings: StepSettings,
    routing: Routing | None,
    *,
    x: Tensor | None = None,
) -> Tensor:
    """The weighted cross-entropy of one micro-batch, summed: a scalar in fp32 on the device.

    The batch is on the device already. x: what a later pipeline stage gets in place of the tokens;
    a stage without a head gives hidden_TD.
    """
    context = settings.parallel.context
    readout = LossReadout(
        context.part(batch.targets_T),
        context.part(batch.weights_T),
        chunk_tokens=settings.loss_chunk_tokens,
        vocabulary=settings.parallel.vocabulary,
    )
    attend = context.attend(
        batch.document_lengths,
        device=settings.device.type,
        routing=routing,
        layers=decoder.config.layers,
    )
    with _autocast(settings):
        return decoder(
            context.part(batch.tokens_T) if x is None else x,
            positions_T=context.part(batch.positions_T),
            attend=attend,
            readout=readout,
        )


def held_out_loss(
    decoder: Decoder,
    micro_batches: Sequence[MicroBatch],
    settings: StepSettings,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, int] | None:
    """(mean loss in nats, number of tokens it is over), without gradients; None if stopped.

    micro_batches: all there are, on every rank, which then takes its share. is_stopped is asked on
    all ranks equally often, and must tell them the same.
    """
    parallel, total = settings.parallel, torch.zeros((), dtype=torch.float64)
    weight = sum(batch.num_loss_tokens for batch in micro_batches)
    assert weight > 0, "held-out text without a single target"
    try:
        for batches in _rounds(micro_batches, parallel):
            if is_stopped():
                return None
            total += _forward_only(decoder, batches, settings).double().cpu()
    finally:
        parallel.sync.release()
    total = parallel.sum_over_all((total / parallel.num_copies).to(settings.device))
    return float(total) / weight, round(weight)


@torch.no_grad()
def _forward_only(
    decoder: Decoder, micro_batches: Sequence[MicroBatch], settings: StepSettings
) -> Tensor:
    """The sum of the losses, where the head is."""
    losses, pipeline = LossSum(settings.device), settings.parallel.pipeline
    works = [HeldOutWork(batch, settings, losses) for batch in micro_batches]
    if pipeline is None:
        for work in works:
            work.forward(decoder, work.tokens_T, None)
    else:
        pipeline.run_forward(works)
    return losses.total


def _rounds(
    micro_batches: Sequence[MicroBatch], parallel: Parallel
) -> Iterator[Sequence[MicroBatch]]:
    """This rank's share of them, a forward or a pipeline's worth at a time.

    All ranks have as many, of a size that can be split: what is missing is filled up by copies and
    by padding that weigh nothing.
    """
    index, count = parallel.data_shard
    pipeline, at_once = parallel.pipeline, 1
    if pipeline is not None:
        at_once = pipeline.num_forwards
    missing = -len(micro_batches) % (count * at_once)
    own = [*micro_batches, *[micro_batches[0].emptied()] * missing][index::count]
    for start in range(0, len(own), at_once):
        batches = own[start : start + at_once]
        if pipeline is not None:
            yield [batch.padded_to(pipeline.num_tokens) for batch in batches]
        else:
            multiple = parallel.token_multiple
            yield [
                batch.padded_to(-(-batch.num_tokens // multiple) * multiple) for batch in batches
            ]


def _autocast(settings: StepSettings) -> AbstractContextManager[object]:
    if settings.precision == "fp32" or not settings.parallel.is_autocast:
        return nullcontext()
    return torch.autocast(settings.device.type, dtype=torch.bfloat16)


def _step_tokens(
    micro_batches: Sequence[MicroBatch], settings: StepSettings
) -> tuple[Tensor, Tensor]:
    """(weight, real tokens) of the step on all ranks, fp64 on the device: not waited for."""
    weight = sum(batch.num_loss_tokens for batch in micro_batches)
    num_real_tokens = sum(batch.num_real_tokens for batch in micro_batches)
    assert weight > 0 or num_real_tokens == 0, f"{num_real_tokens} tokens without a single target"
    counts = torch.tensor([weight, num_real_tokens], dtype=torch.float64, device=settings.device)
    weight_sum, real_sum = settings.parallel.sum_over_data(counts)
    return weight_sum, real_sum


def _scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    held = [held_tensor(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(held, factor)


def _is_finite(value: float) -> bool:
    return value - value == 0.0
