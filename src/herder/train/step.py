"""One optimizer step: micro-batches in, updated parameters and the step's numbers out.

Knows one model, one optimizer and one step; not how many steps there are, where batches come from
or who listens. The loss of held-out text goes through the same forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from herder.data.batch import MicroBatch
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder
from herder.model.readout import LossReadout


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step reports."""

    loss: float
    """Mean over the weights of all micro-batches, in nats."""
    gradient_norm: float
    """Of the whole gradient before clipping."""
    weight: float
    """Sum of the weights: tokens with a target."""


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


def train_step(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    settings: StepSettings,
) -> StepResult:
    """Accumulate gradients over the micro-batches, clip, and update once.

    Every micro-batch's summed loss is divided by the weight of all of them, so that a token counts
    the same wherever it was packed. One transfer from the device: loss and norm together, which
    must be seen before the update. Raises NonFiniteError instead of updating.
    """
    optimizer.zero_grad(set_to_none=True)
    weight = sum(batch.num_loss_tokens for batch in micro_batches)
    assert weight > 0, f"{len(micro_batches)} micro-batches without a single target"
    losses = []
    for batch in micro_batches:
        loss = summed_loss(decoder, batch, settings) / weight
        loss.backward()
        losses.append(loss.detach())
    gradients = _gradients(decoder)
    norm = get_total_norm(gradients)
    loss_value, norm_value = torch.stack([torch.stack(losses).sum(), norm]).tolist()
    result = StepResult(loss=loss_value, gradient_norm=norm_value, weight=weight)
    if not (_is_finite(loss_value) and _is_finite(norm_value)):
        raise NonFiniteError(result)
    if norm_value > settings.clip_norm:
        clip_grads_with_norm_(decoder.parameters(), settings.clip_norm, norm)
    optimizer.step()
    return result


def summed_loss(decoder: Decoder, batch: MicroBatch, settings: StepSettings) -> Tensor:
    """The weighted cross-entropy of one micro-batch, summed: a scalar in fp32 on the device."""
    batch = batch.to(settings.device)
    readout = LossReadout(batch.targets_T, batch.weights_T, chunk_tokens=settings.loss_chunk_tokens)
    attend = PackedAttend(batch.document_lengths, device=settings.device.type)
    with _autocast(settings):
        return decoder(
            batch.tokens_T, positions_T=batch.positions_T, attend=attend, readout=readout
        )


def held_out_loss(
    decoder: Decoder,
    micro_batches: Sequence[MicroBatch],
    settings: StepSettings,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, int] | None:
    """(mean loss in nats, number of tokens it is over), without gradients; None if stopped."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    with torch.no_grad():
        for batch in micro_batches:
            if is_stopped():
                return None
            total += summed_loss(decoder, batch, settings).double().cpu()
            weight += batch.num_loss_tokens
    assert weight > 0, "held-out text without a single target"
    return float(total) / weight, round(weight)


def _autocast(settings: StepSettings) -> AbstractContextManager[object]:
    if settings.precision == "fp32":
        return nullcontext()
    return torch.autocast(settings.device.type, dtype=torch.bfloat16)


def _gradients(decoder: nn.Module) -> list[Tensor]:
    return [p.grad for p in decoder.parameters() if p.grad is not None]


def _is_finite(value: float) -> bool:
    return value - value == 0.0
