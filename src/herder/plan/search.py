"""Chooses a layout: the simplest that fits, the fastest by simulation, or the one that was given.

Owns the order of the simplest plan, the whole space of the fastest one, the micro-batches that are
tried, and why a layout is refused; what a layout costs is priced by memory and step_time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Literal

from herder.config.record import Record
from herder.config.run import LayoutConfig
from herder.errors import PlanError
from herder.plan.candidate import Candidate, Recompute, Request
from herder.plan.given import given_layouts
from herder.plan.layout import (
    MAX_DATA_PARALLEL_RANKS,
    Layout,
    ZeroStage,
    divisors,
    fast_domain_size,
    legal_expert_degrees,
    legal_tensor_degrees,
    make_layout,
    sequence_multiple,
)
from herder.plan.memory import MemoryGb, cannot_fit, training_memory
from herder.plan.pipeline import chosen_schedule, count_problem, legal_count, schedule_problem
from herder.plan.step_time import simulate_step

MICRO_BATCH_TARGET_TOKENS = {"gpu": 16_384, "cpu": 2_048}
"""A micro-batch grows up to this where memory allows: matrix products of this many rows run near
their peak, and more rows only take memory."""
MAX_CONTEXT_PARALLEL_SIZE = 64
MIN_TOKENS_PER_CONTEXT_RANK = 4_096
"""Context parallelism is for length: with fewer tokens a rank, other axes split the work with less
communication. Llama 3 gave each rank 8,192 of 131,072, arXiv:2407.21783, table 4."""


class Rejected(Record):
    """A layout that was looked at and refused, and why."""

    layout: str
    reason: str

    def told(self) -> str:
        """Both in words."""
        return f"{self.layout} {self.reason}"


ChosenBy = Literal["simplest", "fastest", "given"]
Choice = tuple[Candidate | None, list[Rejected]]
"""What was chosen, and what was refused on the way."""


def layouts_by_simplicity(request: Request) -> Iterator[Layout]:
    """TP 1, then the largest legal TP; then pipeline stages; at each step ZeRO 1, 2, 3.

    Experts are spread over the fast links at each stage, then over all links, both before ZeRO-3:
    that gathers the weights of all experts for each micro-batch, and a token meets few of them.
    Context parallelism comes last, when none of these fit: only length asks for it.
    """
    largest = legal_tensor_degrees(request.sizes.architecture, request.cluster)[-1]
    steps = [(1, 1)] + [(largest, pp) for pp in divisors(request.cluster.num_gpus // largest)]
    for cp in _context_degrees(request):
        for tp, pp in dict.fromkeys(steps):
            yield from _layouts(request, tp, pp, cp, zero_stages=(1, 2, 3))


def all_layouts(request: Request) -> Iterator[Layout]:
    """Every legal layout whose data-parallel group is within the cap."""
    for tp in legal_tensor_degrees(request.sizes.architecture, request.cluster):
        for pp in divisors(request.cluster.num_gpus // tp):
            for cp in _context_degrees(request):
                for layout in _layouts(request, tp, pp, cp, zero_stages=(0, 1, 2, 3)):
                    if layout.num_data_ranks <= MAX_DATA_PARALLEL_RANKS:
                        yield layout


def _layouts(
    request: Request, tp: int, pp: int, cp: int, *, zero_stages: Iterable[ZeroStage]
) -> Iterator[Layout]:
    architecture = request.sizes.architecture
    dp, rest = divmod(request.cluster.num_gpus, tp * pp * cp)
    if rest or pp > architecture.num_layers:
        return
    degrees, fast = legal_expert_degrees(architecture, dp * cp), fast_domain_size(request.cluster)
    near = [ep for ep in degrees if ep == 1 or ep * tp <= fast]
    far = degrees[len(near) :]
    stages: tuple[ZeroStage, ...] = tuple(zero_stages) if dp * cp > 1 else (0,)
    whole = tuple(stage for stage in stages if stage < 3)
    for some, spread in ((whole, near), (whole, far), (stages[len(whole) :], degrees)):
        for stage in some:
            for ep in spread:
                yield make_layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero_stage=stage)


def _context_degrees(request: Request) -> list[int]:
    longest = request.train.sequence_length // MIN_TOKENS_PER_CONTEXT_RANK
    largest = max(1, min(MAX_CONTEXT_PARALLEL_SIZE, request.cluster.num_gpus, longest))
    return [2**power for power in range(largest.bit_length())]


def candidates(request: Request, layout: Layout) -> Iterator[Candidate]:
    """Recompute none before full; of each, micro-batches from the largest to one sequence."""
    train = request.train
    choices: tuple[Recompute, ...] = (train.recompute,)
    if request.chooses_recompute:
        choices = ("none", "full")
    sizes = _micro_batch_sizes(request, layout)
    for recompute in choices:
        for size in sizes:
            times = _num_micro_batches(request, layout, size)
            candidate = Candidate(request, layout, size, times, recompute)
            if _schedule_problem(candidate) is None:
                yield candidate


def _num_micro_batches(request: Request, layout: Layout, size: int) -> int:
    """Of a step, on each rank.

    A pipeline's default is a micro-batch a stage at least: with fewer, stages only wait.
    """
    train, stages = request.train, layout.pipeline_parallel_size
    each = train.sequence_length * size * layout.data_parallel_size
    if train.global_batch_tokens is not None:
        return -(-train.global_batch_tokens // each)
    typical = max(stages, -(-(request.typical_batch_tokens or 1) // each))
    return legal_count(chosen_schedule(request.pipeline_schedule, stages, typical), stages, typical)


def _schedule_problem(candidate: Candidate) -> str | None:
    """Why the pipeline's schedule cannot do this, or None."""
    request, layout, schedule = candidate.request, candidate.layout, candidate.schedule
    problem = schedule_problem(schedule, request.sizes.architecture, layout, request.train)
    if problem is None:
        stages = layout.pipeline_parallel_size
        problem = count_problem(schedule, stages, candidate.num_micro_batches)
    return problem


def _micro_batch_sizes(request: Request, layout: Layout) -> list[int]:
    """Powers of two up to the target, those first that make up the global batch evenly.

    None of them where sequences cannot be split evenly: held-out text ends in any number of them.
    """
    train = request.train
    if train.sequence_length % sequence_multiple(layout):
        return []
    largest = max(1, MICRO_BATCH_TARGET_TOKENS[request.gpu.kind] // train.sequence_length)
    sizes = [2**power for power in reversed(range(largest.bit_length()))]
    if train.micro_batch_size is not None:
        sizes = [train.micro_batch_size]
    batch = train.global_batch_tokens or request.typical_batch_tokens
    if batch is None or train.micro_batch_size is not None:
        return sizes
    each = train.sequence_length * layout.data_parallel_size
    within = [size for size in sizes if size * each <= batch] or sizes[-1:]

    def order(size: int) -> tuple[int, int, int]:
        """(tokens it would be off, sequences of the longest share, -size)."""
        return -batch % (size * train.sequence_length), -(-batch // (size * each)) * size, -size

    return sorted(within, key=order)


def fits(request: Request, layout: Layout) -> Iterator[Candidate]:
    """The ways this layout fits: without recompute before with it, large micro-batches first."""
    if cannot_fit(request, layout):
        return
    for candidate in candidates(request, layout):
        memory = training_memory(candidate)
        if memory.total <= memory.budget:
            yield candidate


def _least_memory(request: Request, layout: Layout) -> MemoryGb | None:
    """What the last and smallest candidate of this layout takes; None where there is none."""
    *_, smallest = (None, *candidates(request, layout))
    return training_memory(smallest) if smallest else None


def _judge(request: Request, layout: Layout, *, is_capped: bool) -> Candidate | Rejected:
    """The first way this layout fits, or why it will not do."""
    candidate = next(fits(request, layout), None)
    if candidate is None:
        least = _least_memory(request, layout)
        reason = _why_none(request, layout)
        if least is not None:
            reason = f"needs {least.total:,.1f} GB a device, {least.budget:,.1f} GB may be filled"
    elif is_capped and layout.num_data_ranks > MAX_DATA_PARALLEL_RANKS:
        reason = (
            f"fits memory ({training_memory(candidate).total:,.1f} GB), but communicates over "
            f"{layout.num_data_ranks:,} data-parallel ranks; the cap is {MAX_DATA_PARALLEL_RANKS}"
        )
    else:
        return candidate
    return Rejected(layout=layout.told(), reason=reason)


def _why_none(request: Request, layout: Layout) -> str:
    """Of a layout for which there is no candidate at all."""
    sizes = _micro_batch_sizes(request, layout)
    if not sizes:
        return f"a sequence is no multiple of {sequence_multiple(layout)} tokens (TP and twice CP)"
    times = _num_micro_batches(request, layout, sizes[-1])
    candidate = Candidate(request, layout, sizes[-1], times, request.train.recompute)
    return f"pipeline_schedule={candidate.schedule} {_schedule_problem(candidate)}"


def _first(request: Request, layouts: Iterable[Layout], *, is_capped: bool) -> Choice:
    rejected: list[Rejected] = []
    for layout in layouts:
        judged = _judge(request, layout, is_capped=is_capped)
        if isinstance(judged, Candidate):
            return judged, rejected
        rejected.append(judged)
    return None, rejected


def choose_simplest(request: Request) -> Choice:
    """The first layout in order of simplicity that satisfies memory and the cap."""
    return _first(request, layouts_by_simplicity(request), is_capped=True)


_DEGREES = {
    "CP": "context_parallel_size",
    "TP": "tensor_parallel_size",
    "PP": "pipeline_parallel_size",
    "EP": "expert_parallel_size",
    "ZeRO": "zero_stage",
}
"""As layouts_by_simplicity raises them, the last first; EP and ZeRO take turns."""


def layout_reason(chosen: Candidate, rejected: Sequence[Rejected], chosen_by: ChosenBy) -> str:
    """In words, why this layout and not its neighbours; `rejected` is what was refused for it."""
    memory = training_memory(chosen)
    if chosen_by == "simplest":
        reasons = list(_without(chosen, rejected)) or ["The first one that was tried fits."]
    elif chosen_by == "given":
        reasons = ["The degrees are given."]
        reasons += [f"Not with less ZeRO: {entry.told()}." for entry in rejected[-1:]]
    else:
        reasons = ["The fastest by simulation."]
        reasons += [f"Next best: {entry.told()}." for entry in rejected[:1]]
    needs = f"This one needs {memory.total:,.1f} GB, {memory.budget:,.1f} GB may be filled."
    return " ".join([*reasons, needs])


def _without(chosen: Candidate, rejected: Sequence[Rejected]) -> Iterator[str]:
    """Of each degree above the least, the last layout that was refused with less of it, later ones
    being equal: what comes nearest without."""
    refused = list(zip(layouts_by_simplicity(chosen.request), rejected, strict=False))
    for name, field in _DEGREES.items():
        degree = getattr(chosen.layout, field)
        less = [entry for layout, entry in refused if getattr(layout, field) < degree]
        if less:
            sign = "-" if name == "ZeRO" else " "
            yield f"{name}{sign}{degree}: with less, {less[-1].told()}."
        if name in ("CP", "TP", "PP"):
            refused = [each for each in refused if getattr(each[0], field) == degree]


def nearest_refusals(request: Request) -> str:
    """For errors: how many layouts were refused, and the three that need least memory."""

    def needed(layout: Layout) -> float:
        least = _least_memory(request, layout)
        return least.total if least else inf

    layouts = sorted(layouts_by_simplicity(request), key=needed)
    _, nearest = _first(request, layouts[:3], is_capped=True)
    return f"Nearest of {len(layouts)} layouts:\n{_listed(nearest)}"


def _listed(rejected: Iterable[Rejected]) -> str:
    return "\n".join(f"  {entry.layout}: {entry.reason}" for entry in rejected)


def choose_fastest(request: Request) -> Choice:
    """The layout, micro-batch and recompute with most simulated tokens a second.

    A layout that needs a larger global batch than was asked for is taken only if none keeps to it.
    The five best of the other layouts are what was refused.
    """
    limit = request.train.global_batch_tokens or inf
    ranked = [
        (candidate.global_batch_tokens <= limit, tokens_per_second(candidate), candidate)
        for candidate in _worthwhile(request)
    ]
    ranked.sort(reverse=True, key=lambda entry: entry[:2])
    rates: dict[Layout, float] = {}
    for _, rate, candidate in ranked:
        rates.setdefault(candidate.layout, rate)
    slower = [
        Rejected(layout=layout.told(), reason=f"simulated {1 - rate / ranked[0][1]:.1%} slower")
        for layout, rate in list(rates.items())[1:6]
    ]
    return ranked[0][2] if ranked else None, slower


def _worthwhile(request: Request) -> Iterator[Candidate]:
    """All fits but those that cannot be faster than one before.

    Recompute only costs time where a layout does without, and so does a ZeRO stage above the first
    that shards the optimizer and keeps all activations.
    """
    settled: set[Layout] = set()
    for layout in all_layouts(request):
        degrees = layout.model_copy(update={"zero_stage": 0})
        if degrees in settled:
            continue
        does_without = False
        for candidate in fits(request, layout):
            if candidate.recompute == "full" and does_without:
                break
            does_without = does_without or candidate.recompute == "none"
            yield candidate
        if does_without and layout.zero_stage >= 1:
            settled.add(degrees)


def tokens_per_second(candidate: Candidate) -> float:
    """Simulated training throughput of the whole cluster."""
    return candidate.global_batch_tokens / simulate_step(candidate).total


def choose_given(request: Request, given: LayoutConfig) -> Choice:
    """The layout given by hand with the lowest ZeRO stage that fits, unless that is given too.

    Raises PlanError when the degrees are illegal or do not fit.
    """
    layouts = given_layouts(request, given)
    _check_schedule(request, layouts)
    chosen, rejected = _first(request, layouts, is_capped=False)
    if chosen is None:
        raise PlanError(
            f"layout: {request.model} does not fit with the degrees given:\n{_listed(rejected)}\n"
            "Give more degrees, set train.recompute: full or a smaller train.micro_batch_size, or "
            "leave layout: auto."
        )
    return chosen, rejected


def _check_schedule(request: Request, layouts: list[Layout]) -> None:
    """Refuse a pipeline schedule that can do none of these layouts."""
    for layout in layouts:
        if not _micro_batch_sizes(request, layout) or any(candidates(request, layout)):
            return
    layout, train, schedule = layouts[0], request.train, request.pipeline_schedule
    stages, size = layout.pipeline_parallel_size, _micro_batch_sizes(request, layout)[-1]
    times = _num_micro_batches(request, layout, size)
    would_do = "--set layout.pipeline_schedule=auto"
    chosen = chosen_schedule(schedule, stages, times)
    if schedule_problem(chosen, request.sizes.architecture, layout, train) is None:
        each = train.sequence_length * size * layout.data_parallel_size
        legal = legal_count(chosen, stages, times)
        would_do = f"--set train.global_batch_tokens={legal * each} or {would_do}"
    raise PlanError(f"layout: {_why_none(request, layout)} ({request.model}).\nTry {would_do}.")
