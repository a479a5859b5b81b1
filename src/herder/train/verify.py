"""The same model, data and steps in one process and under a layout, on ranks of this machine.

Owns what is run and what is compared; which layouts there are, what is tolerated and how it is
shown is told elsewhere. Everything that a training run does between its batches and its parameters
is done here by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from herder.config.architecture import ArchitectureConfig
from herder.config.run import OptimizerConfig
from herder.data.batch import MicroBatch
from herder.data.dataset import TokenDataset
from herder.data.packing import PackedRows
from herder.errors import PlanError, RankError
from herder.families.weights import EMBEDDING, HEAD
from herder.model.build import build_decoder, initialize_weights
from herder.model.decoder import Decoder
from herder.parallel.apply import Parallel, apply
from herder.parallel.mesh import build_mesh
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part, whole_tensor
from herder.plan.training import TrainingPlan
from herder.train.optimizer import build_optimizer
from herder.train.routers import router_noise
from herder.train.step import StepSettings, train_step
from herder.train.verify_choices import MAX_SEEDS, MIN_MARGIN, ClosestChoice
from herder.train.verify_layouts import (
    MIN_MICRO_BATCHES,
    SEQUENCE_LENGTH,
    VerifyLayout,
    parse_layout,
    plan_layout,
)
from herder.train.verify_report import Cell, Report, Watch

SEED = 0
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3)
"""epsilon: at AdamW's usual 1e-8 a gradient of rounding alone moves its parameter by the whole
learning rate, this way or that; here it has to be of some size to move it."""
CLIP_NORM = 0.5
"""Less than gradients have at first, so that clipping is compared too."""
LOSS_CHUNK_TOKENS = 24
"""Does not divide a micro-batch: the last chunk is shorter."""
NUM_DOCUMENTS = 400
SHARE_OF_PATTERN = 0.9
GRADIENT_FLOOR = 1e-2
"""Of the model's largest gradient: what smaller ones are held against."""
TIMEOUT_SECONDS = 120.0

Tamper = Callable[[Decoder, Parallel], None]
"""Breaks something on a rank after the layout is applied: how tests see that it is noticed."""


@dataclass(frozen=True)
class Trial:
    """What is the same in every layout."""

    architecture: ArchitectureConfig
    num_steps: int
    timeout_seconds: float
    seed: int = SEED
    """Of the data."""


@dataclass(frozen=True)
class Trace:
    """What one rank saw. Tensors are whole, by the names they have in one process."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    """As the optimizer got them, at the first and at the last step."""
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    """Parameters and buffers before the first and after the last step."""
    closest_choice: float
    """Of routers, in one process; infinite without any."""


def verify(
    architecture: ArchitectureConfig,
    layouts: Sequence[VerifyLayout],
    *,
    model: str,
    num_steps: int,
    watch: Watch = lambda _layout, _num_ranks: None,
    tamper: Tamper | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Report:
    """Run every layout and compare it with one process. `architecture` is run as it is.
    timeout_seconds: of one collective.

    Raises ModelError for a model that cannot be built. What the planner refuses is a refused cell,
    a rank that dies a failed one.
    """
    build_decoder(architecture)
    trial = Trial(architecture, num_steps, timeout_seconds)
    alone = plan_layout(architecture, parse_layout("dp=1"))

    @cache
    def one_process(num_micro_batches: int) -> tuple[Trial, Trace]:
        tokens = num_micro_batches * SEQUENCE_LENGTH
        plan = alone.model_copy(update={"global_batch_tokens": tokens})
        tried = list[tuple[Trial, Trace]]()
        while len(tried) < MAX_SEEDS:
            seeded = replace(trial, seed=SEED + len(tried))
            tried.append((seeded, _run(seeded, plan, None)[0]))
            if tried[-1][1].closest_choice > MIN_MARGIN:
                break
        return max(tried, key=lambda each: each[1].closest_choice)

    cells = []
    for layout in layouts:
        watch(layout.text, layout.num_ranks)
        cells.append(_cell(trial, layout, one_process, tamper))
    losses = one_process(MIN_MICRO_BATCHES)[1].losses
    return Report(model=model, losses=tuple(losses), cells=tuple(cells))


def _cell(
    trial: Trial,
    layout: VerifyLayout,
    one_process: Callable[[int], tuple[Trial, Trace]],
    tamper: Tamper | None,
) -> Cell:
    cell = Cell(layout=layout.text, ranks=layout.num_ranks)
    try:
        plan = plan_layout(trial.architecture, layout)
    except PlanError as error:
        return replace(cell, refused=str(error))
    seeded, reference = one_process(layout.num_micro_batches)
    try:
        traces = _run(seeded, plan, tamper)
    except RankError as error:
        return replace(cell, error=str(error))
    return compared(cell, traces, reference)


def _run(trial: Trial, plan: TrainingPlan, tamper: Tamper | None) -> list[Trace]:
    return run_on_ranks(
        train_on_this_rank,
        plan.layout.num_ranks,
        trial,
        plan,
        tamper,
        timeout_seconds=trial.timeout_seconds,
    )


def train_on_this_rank(trial: Trial, plan: TrainingPlan, tamper: Tamper | None) -> Trace:
    """A few steps from the same start on this rank's share of the same data."""
    architecture, device = trial.architecture, torch.device("cpu")
    mesh = build_mesh(plan.mesh_axes, device.type) if plan.layout.num_ranks > 1 else None
    decoder = build_decoder(architecture)
    parallel = apply(decoder, plan, mesh, device=device)
    initialize_weights(decoder, seed=SEED, place=copy_part)
    decoder.train()
    if tamper is not None:
        tamper(decoder, parallel)
    start = _state(decoder)
    optimizer = build_optimizer(decoder.named_parameters(), OPTIMIZER)
    settings = StepSettings(
        device=device,
        precision="fp32",
        loss_chunk_tokens=LOSS_CHUNK_TOKENS,
        clip_norm=CLIP_NORM,
        parallel=parallel,
    )
    dataset = _dataset(architecture, plan.global_batch_tokens, trial.seed)
    results, gradients, choices = [], [], ClosestChoice()
    for step in range(trial.num_steps):
        batches = _micro_batches(dataset, step, parallel.data_shard)
        noise = router_noise(architecture.moe, seed=SEED, step=step)
        with choices if mesh is None else nullcontext():
            results.append(train_step(decoder, optimizer, batches, settings, noise=noise))
        if step in (0, trial.num_steps - 1):
            gradients.append(_gradients(decoder))
    return Trace(
        losses=[result.loss for result in results],
        norms=[result.gradient_norm for result in results],
        gradients=gradients,
        start=start,
        end=_state(decoder),
        closest_choice=choices.margin,
    )


def _dataset(architecture: ArchitectureConfig, tokens_of_step: int, seed: int) -> TokenDataset:
    """Documents of a pattern: mostly a token's own successor, among a quarter of the vocabulary,
    which is spread over all of it."""
    generator = np.random.default_rng(seed)
    vocabulary = np.arange(0, architecture.vocab_size, 4)
    successor = generator.permutation(len(vocabulary))
    lengths = generator.integers(5, 48, NUM_DOCUMENTS)
    tokens = [generator.integers(len(vocabulary))]
    for follows in generator.random(int(lengths.sum()) - 1) < SHARE_OF_PATTERN:
        drawn = generator.integers(len(vocabulary))
        tokens.append(successor[tokens[-1]] if follows else drawn)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenDataset(
        PackedRows(vocabulary[tokens], offsets, sequence_length=SEQUENCE_LENGTH),
        micro_batch_size=1,
        global_batch_tokens=tokens_of_step,
        seed=seed,
    )


def _micro_batches(dataset: TokenDataset, step: int, shard: tuple[int, int]) -> list[MicroBatch]:
    """This rank's, some of which count half and some one and a half times."""
    index, count = shard
    batches = dataset.micro_batches(step, shard_index=index, num_shards=count)
    weights = [0.5 * (1 + batch.first_token // SEQUENCE_LENGTH % 3) for batch in batches]
    return [
        replace(batch, weights_T=batch.weights_T * weight)
        for batch, weight in zip(batches, weights, strict=True)
    ]


def _state(decoder: Decoder) -> dict[str, Tensor]:
    held = [*decoder.named_parameters(), *decoder.named_buffers()]
    return {_name(decoder, name): whole_tensor(each.detach()).clone() for name, each in held}


def _gradients(decoder: Decoder) -> dict[str, Tensor]:
    """Whole ones; zeros where nothing used a parameter."""
    return {
        _name(decoder, name): whole_tensor(
            torch.zeros_like(each) if each.grad is None else each.grad
        )
        .detach()
        .clone()
        for name, each in decoder.named_parameters()
    }


def _name(decoder: Decoder, name: str) -> str:
    """The last pipeline stage's copy of a tied embedding is the embedding."""
    return EMBEDDING if name == HEAD and decoder.config.tie_embeddings else name


def compared(cell: Cell, traces: Sequence[Trace], reference: Trace) -> Cell:
    """The cell with the largest differences on any rank; failed where ranks lack a parameter."""
    missing = reference.end.keys() - {name for trace in traces for name in trace.end}
    if missing:
        return replace(cell, error=f"no rank holds {sorted(missing)[0]}")
    gradients = _gradient_differences(traces, reference)
    worst = max(gradients, key=lambda name: _nan_last(gradients[name]))
    return replace(
        cell,
        max_relative_loss_difference=_relative([t.losses for t in traces], reference.losses),
        max_relative_norm_difference=_relative([t.norms for t in traces], reference.norms),
        max_gradient_difference=gradients[worst],
        worst_parameter=worst,
        max_parameter_difference=_parameter_difference(traces, reference),
    )


def _relative(found: Sequence[Sequence[float]], wanted: Sequence[float]) -> float:
    pairs = [pair for each in found for pair in zip(each, wanted, strict=True)]
    return max((abs(a - b) / abs(b) for a, b in pairs), key=_nan_last)


def _gradient_differences(traces: Sequence[Trace], reference: Trace) -> dict[str, float]:
    """By parameter, over ranks and both steps."""
    largest = dict[str, float]()
    for place, wanted in enumerate(reference.gradients):
        sizes = {name: _largest(gradient) for name, gradient in wanted.items()}
        floor = GRADIENT_FLOOR * max(sizes.values())
        for trace in traces:
            for name, gradient in trace.gradients[place].items():
                difference = _largest(gradient - wanted[name]) / max(sizes[name], floor)
                largest[name] = max(difference, largest.get(name, 0.0), key=_nan_last)
    return largest


def _parameter_difference(traces: Sequence[Trace], reference: Trace) -> float:
    moved = max(_largest(reference.end[name] - each) for name, each in reference.start.items())
    differences = [
        _largest(each - reference.end[name]) for trace in traces for name, each in trace.end.items()
    ]
    return max(differences, key=_nan_last) / moved


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _nan_last(value: float) -> tuple[bool, float]:
    """Orders what is not a number after all numbers: a maximum must not pass over it."""
    return value != value, value
