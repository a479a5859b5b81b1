"""What can happen in a run, as typed records, and the one bus that tells the sinks.

An event is a fact with its numbers; how it is shown or stored is a sink's affair (`sinks`,
`console`, `tensorboard`). Nothing here knows a config, a model or a tensor: values are numbers and
strings.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A training run begins, or goes on at `first_step` steps done."""

    run_directory: str
    model: str
    parameters: int
    first_step: int
    """Steps that were done before; 0 for a new run."""
    steps: int
    step_tokens: int
    """Tokens an optimizer step reads, padding included."""
    precision: str
    device: str
    num_threads: int
    flops_per_token: float
    """Of forward and backward, by the planner's convention; recompute is not counted."""
    peak_flops_per_second: float | None
    peak_source: str
    """Where the peak is from: a catalog name, or that it was measured here."""
    config_hash: str
    git_commit: str | None


@dataclass(frozen=True, kw_only=True)
class StepFinished:
    """One optimizer step is done; `step` counts finished steps, so the first is 1."""

    step: int
    loss: float
    """Mean over the step's weighted tokens, in nats."""
    gradient_norm: float
    """Of the whole gradient before clipping."""
    learning_rate: float
    tokens: int
    """Tokens with a target in this step: padding and last tokens of documents are not counted."""
    seconds: float
    """This step alone: saving and evaluation are not in it."""
    tokens_per_second: float
    """All tokens read, padding included, over the last steps (see meters.Throughput)."""
    model_flops_utilization: float | None
    peak_memory_bytes: int
    """Highest so far: device memory allocated, or resident memory of the process on a CPU."""
    seconds_left: float
    aux_loss: float | None = None
    """Load-balancing loss before its coefficient, no part of `loss`; num_experts_per_token is
    balance. None without routed experts."""
    z_loss: float | None = None
    """Router z-loss before its coefficient, no part of `loss`."""


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """What the router of one layer did since the last such event. Padding takes no part in it.

    Told before the StepFinished of the same step.
    """

    step: int
    layer: int
    tokens: int
    selections: tuple[int, ...]
    """How often each expert was chosen: num_experts_per_token times the tokens in all."""
    imbalance: float
    """The busiest expert's selections over the mean: 1 is balance."""
    entropy: float
    """Of the router's probabilities over all experts, in nats, mean over tokens."""
    max_entropy: float
    """ln(num_experts): a router that prefers nothing."""
    dead: tuple[int, ...]
    """Experts that the last few events counted no selection for."""
    dominant: tuple[int, ...]
    """Experts that over 90 % of the tokens chose, and more than the mean."""
    dropped_tokens: int
    """Choices an expert had no room for, where moe.capacity_factor limits it."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a process that drives several devices has taken of each, the highest so far.

    Told before the StepFinished of the same step.
    """

    step: int
    peak_bytes: tuple[int, ...]
    """Of each device in turn: allocated on a GPU; without one, resident memory of the process."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A whole checkpoint is on disk under its final name. Told after a later step, maybe."""

    step: int
    path: str
    num_bytes: int
    seconds: float
    """From its start until it had its name; training went on during most of them."""
    stall_seconds: float | None = None
    """How long training stood still for it, waiting for the one before included."""
    full_bytes: int | None = None
    """Of the full checkpoint that a light one rests on; None for a full one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaded:
    """A run goes on from this checkpoint."""

    step: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluationFinished:
    """The held-out documents were read once, up to a number of tokens."""

    step: int
    loss: float
    """Mean over held-out tokens, in nats."""
    perplexity: float
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something a person should know that is not wrong, an adjustment for example."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something went wrong; `kind` is one word or a few joined by underscores, for counting."""

    kind: str
    message: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunInterrupted:
    """A signal ended the run between two steps; what was done is saved."""

    step: int
    signal: str
    seconds: float | None = None
    """From the signal until all was saved; None where only another rank got it."""


@dataclass(frozen=True, kw_only=True)
class RunFinished:
    """All steps are done. Seconds and tokens are of this process, not of earlier ones."""

    step: int
    loss: float
    seconds: float
    tokens: int
    tokens_per_second: float
    model_flops_utilization: float | None


Event = (
    RunStarted
    | StepFinished
    | RouterStats
    | DeviceMemory
    | CheckpointSaved
    | CheckpointLoaded
    | EvaluationFinished
    | Notice
    | Incident
    | RunInterrupted
    | RunFinished
)

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        StepFinished,
        RouterStats,
        DeviceMemory,
        CheckpointSaved,
        CheckpointLoaded,
        EvaluationFinished,
        Notice,
        Incident,
        RunInterrupted,
        RunFinished,
    )
}


def to_json(event: Event, *, unix_seconds: float) -> str:
    """One line of JSON: the kind as `event`, the wall clock as `unix_seconds`, then the fields.

    A number that JSON has no word for (a loss that is not finite) is written as null.
    """
    fields = {name: _finite(value) for name, value in dataclasses.asdict(event).items()}
    line = {"event": type(event).__name__, "unix_seconds": round(unix_seconds, 3), **fields}
    return json.dumps(line, allow_nan=False)


def from_json(line: str) -> Event:
    """The event that `to_json` wrote.

    Raises ValueError for a line that is not one whole event, as after a crash in mid-line.
    """
    fields = json.loads(line)
    if not isinstance(fields, Mapping) or fields.get("event") not in _KINDS:
        raise ValueError(f"not an event: {line[:80]!r}")
    kind = _KINDS[fields["event"]]
    names = {field.name for field in dataclasses.fields(kind)}
    known = {name: value for name, value in fields.items() if name in names}
    try:
        return kind(**{name: _tuple(value) for name, value in known.items()})
    except TypeError as error:
        raise ValueError(f"not a whole {kind.__name__}: {error}") from error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _finite(value: object) -> object:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


class Sink(Protocol):
    """One listener. `receive` may raise: the bus reports it and goes on."""

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Take one event; `unix_seconds` is when it happened."""

    def close(self) -> None:
        """Flush and let go of files and terminals."""


class Bus:
    """Hands every event to every sink, in order.

    Observation never ends a run: a sink that raises is reported on stderr once, kept, and tried
    again at the next event, since a full disk may be freed.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._reported: set[int] = set()

    def emit(self, event: Event) -> None:
        """Tell all sinks, stamped with the wall clock."""
        now = time.time()
        for sink in self._sinks:
            with self._contained(sink):
                sink.receive(event, unix_seconds=now)

    def close(self) -> None:
        """Close all sinks, also when one of them raises."""
        for sink in self._sinks:
            with self._contained(sink):
                sink.close()

    @contextmanager
    def _contained(self, sink: Sink) -> Generator[None]:
        try:
            yield
        except Exception as error:
            if id(sink) not in self._reported:
                self._reported.add(id(sink))
                name = type(sink).__name__
                print(f"herder: {name} failed, training goes on: {error!r}", file=sys.stderr)
