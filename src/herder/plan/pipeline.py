"""Pipeline schedules: what each can do, how long a rank waits in it, and how much it keeps.

Owns the arithmetic of a schedule and the reasons why it cannot run. The order of its actions is
torch's. A schedule cuts the model into `chunks` stages a rank; stage s is rank s modulo ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

from herder.config.architecture import ArchitectureConfig
from herder.config.run import PipelineSchedule, TrainConfig
from herder.plan.layout import Layout

Schedule = Literal["none"] | PipelineSchedule
"""none: there is one stage."""
_CHUNKS: dict[Schedule, int] = {"interleaved_1f1b": 2, "zero_bubble": 2}


def chunks_per_rank(schedule: Schedule) -> int:
    """How many stages each pipeline rank has; they are those furthest apart."""
    return _CHUNKS.get(schedule, 1)


def chosen_schedule(
    asked: Literal["auto"] | PipelineSchedule, num_ranks: int, num_micro_batches: int
) -> Schedule:
    """auto is 1f1b, or gpipe where there are too few micro-batches for it: they are kept alike."""
    if num_ranks == 1:
        return "none"
    if asked != "auto":
        return asked
    return "1f1b" if num_micro_batches >= num_ranks else "gpipe"


def count_problem(schedule: Schedule, num_ranks: int, num_micro_batches: int) -> str | None:
    """Why a schedule cannot do so many micro-batches a step, or None."""
    if schedule in ("none", "gpipe"):
        return None
    if num_micro_batches < num_ranks:
        return (
            f"needs a micro-batch a pipeline rank at least, and a step has {num_micro_batches} for "
            f"{num_ranks}"
        )
    rounds = num_micro_batches // num_ranks
    if chunks_per_rank(schedule) > 1 and num_micro_batches % rounds:
        return (
            f"takes equal rounds of at least {num_ranks} micro-batches, and {num_micro_batches} "
            f"make no {rounds} equal rounds"
        )
    return None


def legal_count(schedule: Schedule, num_ranks: int, at_least: int) -> int:
    """The smallest number of micro-batches, `at_least` or more, that a schedule can do."""
    legal = (n for n in count(at_least) if count_problem(schedule, num_ranks, n) is None)
    return next(legal)


def schedule_problem(
    schedule: Schedule, architecture: ArchitectureConfig, layout: Layout, train: TrainConfig
) -> str | None:
    """Why a schedule cannot run this model in this layout, whatever the batch; or None."""
    ranks, chunks = layout.pipeline_parallel_size, chunks_per_rank(schedule)
    stages = ranks * chunks
    if stages > architecture.num_layers:
        of = f" ({ranks} ranks with {chunks} each)" if chunks > 1 else ""
        return f"makes {stages} stages{of} of {architecture.num_layers} layers"
    if schedule == "zero_bubble":
        return next(_zero_bubble_problems(architecture, layout, train), None)
    return None


def _zero_bubble_problems(
    architecture: ArchitectureConfig, layout: Layout, train: TrainConfig
) -> Iterator[str]:
    """It takes the gradients of inputs and of weights in two passes over the same graph."""
    if layout.zero_stage > 1:
        yield (
            f"keeps a stage's parameters gathered and its gradients whole through the step, and "
            f"zero_stage is {layout.zero_stage}"
        )
    if train.recompute == "full":
        yield "would compute every layer again for each weight, and train.recompute is full"
    if train.compile:
        yield "cannot take a compiled backward apart, and train.compile is true"
    if any(layer.feed_forward == "routed" for layer in architecture.layers):
        yield "cannot take the gradients of experts apart from those of their inputs"


def waiting_micro_batches(schedule: Schedule, num_ranks: int) -> float:
    """The bubble: how long a rank has nothing to do in a step, in its own time for a micro-batch.

    Sources: Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2; zero bubble keeps one of
    forward, input gradients and weight gradients, which take about as long each, of ZB-H1,
    arXiv:2401.10241, table 2.
    """
    waiting = (num_ranks - 1) / chunks_per_rank(schedule)
    return waiting / 3 if schedule == "zero_bubble" else waiting


@dataclass(frozen=True, slots=True)
class Flight:
    """The micro-batches of a step on their way through one rank's stages."""

    schedule: Schedule
    num_ranks: int
    rank: int
    num_micro_batches: int

    @property
    def kept(self) -> float:
        """Most micro-batches whose activations of all the rank's stages are kept at once.

        As torch starts its schedules: so many forwards go before the first backward, and zero
        bubble keeps what the weight gradients need for as many more as there are ranks before.
        """
        behind, chunks = self.num_ranks - 1 - self.rank, chunks_per_rank(self.schedule)
        if self.schedule == "gpipe":
            return self.num_micro_batches
        if self.schedule in ("none", "1f1b"):
            return min(self.num_micro_batches, behind + 1)
        each_round = self.num_micro_batches // max(1, self.num_micro_batches // self.num_ranks)
        started = (chunks - 1) * each_round
        started += 2 * behind if self.schedule == "interleaved_1f1b" else behind + self.rank
        return min(started + 1, self.num_micro_batches * chunks) / chunks
