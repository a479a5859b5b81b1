"""Bytes of state that a rank allocates for parameters, gradients and optimizer, tensor by tensor.

What parallel/ does with a plan, counted: the 16N rule is memory's, this is what the largest rank's
tensors add up to, padding of uneven shards included. A test holds both to be equal.

ZeRO stage 0: parameters in fp32, gradients in fp32 and both moments in fp32, all whole; products
are in bf16 by autocast. Stages 1 to 3, by FSDP2: fp32 parameters (the master copy) and moments,
sharded; parameters in the compute dtype, whole between micro-batches in stages 1 and 2, of two
units at a time in stage 3 (a buffer, not state); gradients whole in the dtype of the reduction
while stage 1 accumulates them, sharded and in fp32 in stages 2 and 3 and, for the optimizer, in
all. Routers compute, accumulate and reduce in fp32. Source: ZeRO, arXiv:1910.02054, section 5;
what FSDP2 keeps is in torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from herder.config.record import Record
from herder.plan.parameters import Weight

MASTER_BYTES = 4
"""Of a number in fp32: what the optimizer updates, and each of its two moments."""
COUNTER_BYTES = 4
"""AdamW counts the steps of each tensor in a tensor of its own."""


def sharded_dim(shape: Sequence[int], num_shards: int) -> int:
    """Which dim of a tensor ZeRO shares out: the first that divides evenly, or else the first.

    Eight stacked experts on 32 ranks would leave 24 of them nothing, and eight four times their
    share. FSDP2 pads the first dim alone.
    """
    return next((dim for dim, size in enumerate(shape) if size % num_shards == 0), 0)


@dataclass(frozen=True, slots=True)
class HeldNumbers:
    """Numbers of some weights, on one rank."""

    whole: int = 0
    """Before ZeRO."""
    share: int = 0
    """After it, with what pads uneven shards: of every rank, and without padding of the first."""
    gathered: int = 0
    """Whole again, each rank's padding included."""
    tensors: int = 0

    def plus(self, shape: Sequence[int], num_shards: int, times: int) -> HeldNumbers:
        """These and `times` tensors of a shape."""
        dim = sharded_dim(shape, num_shards)
        share = prod(-(-n // num_shards) if at == dim else n for at, n in enumerate(shape))
        return HeldNumbers(
            self.whole + times * prod(shape),
            self.share + times * share,
            self.gathered + times * share * num_shards,
            self.tensors + times,
        )


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A rank's numbers by the dtype that they are gathered and reduced in."""

    cast: HeldNumbers
    """In the plan's."""
    exact: HeldNumbers
    """In fp32: routers."""

    @property
    def tensors(self) -> int:
        return self.cast.tensors + self.exact.tensors

    @property
    def whole(self) -> int:
        """Numbers before ZeRO."""
        return self.cast.whole + self.exact.whole

    @property
    def share(self) -> int:
        """Numbers after it."""
        return self.cast.share + self.exact.share


def held_weights(
    weights: Iterable[tuple[Weight, int]],
    *,
    tp: int,
    ep: int,
    num_shards: int,
    num_key_value_heads: int,
) -> HeldWeights:
    """Of weights, each with how often it is there. Of `num_shards` ranks, those that hold the same
    experts share these out, which are a part of them."""
    cast, exact = HeldNumbers(), HeldNumbers()
    for weight, times in weights:
        shape = weight.held_shape(tp=tp, ep=ep, num_key_value_heads=num_key_value_heads)
        shards = num_shards // ep if weight.module == "experts" else num_shards
        if weight.module == "router":
            exact = exact.plus(shape, shards, times)
        else:
            cast = cast.plus(shape, shards, times)
    return HeldWeights(cast, exact)


class StateBytes(Record):
    """What the largest rank of a plan allocates for state."""

    stage: int
    """Its pipeline stage, counted from 0."""
    parameters: int
    """Kept through the run: the optimizer's copy in fp32."""
    gathered_parameters: int
    """Whole, in the compute dtype, between micro-batches; freed when the last one is done."""
    accumulated_gradients: int
    """Between micro-batches."""
    reduced_gradients: int
    """When the optimizer steps."""
    optimizer: int
    """Two moments in fp32, and counters of steps."""

    @property
    def total(self) -> int:
        """At the fuller of the two moments. The first is counted also where one micro-batch a step
        never accumulates, so that a larger batch does not change what fits."""
        accumulating = self.gathered_parameters + self.accumulated_gradients
        return self.parameters + self.optimizer + max(accumulating, self.reduced_gradients)


def allocated_state(
    held: HeldWeights,
    *,
    stage: int,
    zero_stage: int,
    compute_bytes: int,
    gradient_bytes: int,
) -> StateBytes:
    """The bytes of a pipeline stage's rank. compute_bytes, gradient_bytes: of a number in the dtype
    of the computation and of the gradients' reduction."""
    kept = held.share if zero_stage > 0 else held.whole
    gathered, accumulated = 0, MASTER_BYTES * kept
    if zero_stage in (1, 2):
        gathered = held.cast.gathered * compute_bytes + held.exact.gathered * MASTER_BYTES
    if zero_stage == 1:
        accumulated = held.cast.whole * gradient_bytes + held.exact.whole * MASTER_BYTES
    return StateBytes(
        stage=stage,
        parameters=MASTER_BYTES * kept,
        gathered_parameters=gathered,
        accumulated_gradients=accumulated,
        reduced_gradients=MASTER_BYTES * kept,
        optimizer=2 * MASTER_BYTES * kept + COUNTER_BYTES * held.tensors,
    )
