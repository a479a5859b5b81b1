"""Sinks for files and pipes: JSON lines, and one plain line an event for people and logs.

A sink takes events as they are and knows nothing of training. The live display is in `console`,
TensorBoard in `tensorboard`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from herder.observe.events import (
    CheckpointLoaded,
    CheckpointSaved,
    DeviceMemory,
    EvaluationFinished,
    Event,
    Incident,
    Notice,
    RouterStats,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StepFinished,
    from_json,
    to_json,
)
from herder.units import format_count, format_flops, format_gb, format_seconds

EVENTS = "events.jsonl"
"""The file of a run directory that events are in."""


class JsonLinesSink:
    """Appends one line an event to a file, each flushed, so that a killed run has told all it did.

    A line torn by a crash is closed first, so that the next event stands on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        torn = _ends_within_a_line(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Write and flush one line."""
        self._file.write(to_json(event, unix_seconds=unix_seconds) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LineSink:
    """Writes one readable line an event: the log of a run whose output is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._steps = 0
        self._routers = dict[int, RouterStats]()
        self._memory: DeviceMemory | None = None

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Write and flush one line; routers and devices stand in the line of their step."""
        if isinstance(event, RouterStats):
            self._routers[event.layer] = event
            return
        if isinstance(event, DeviceMemory):
            self._memory = event
            return
        if isinstance(event, RunStarted):
            self._steps = event.steps
        line = describe(event, steps=self._steps)
        if isinstance(event, StepFinished) and self._routers:
            line += "  " + describe_routers(self._routers.values())
        if isinstance(event, StepFinished) and self._memory:
            line += "  " + describe_memory(self._memory)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """The stream is the caller's: it stays open."""


def read_events(path: Path) -> Iterator[Event]:
    """The events of a JSON-lines file, oldest first; a line torn by a crash is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield from_json(line)
            except ValueError:
                continue


def describe(event: Event, *, steps: int) -> str:
    """An event as one line of words and numbers; `steps` is how many the run has in all."""
    match event:
        case RunStarted():
            return _describe_start(event)
        case StepFinished():
            return describe_step(event, steps=steps)
        case RouterStats():
            return f"layer {event.layer} after step {event.step}: {describe_routers([event])}"
        case DeviceMemory():
            return f"after step {event.step}: {describe_memory(event)}"
        case CheckpointSaved():
            return f"checkpoint {event.path} saved, {describe_save(event)}"
        case CheckpointLoaded():
            return f"resumed after step {event.step} from {event.path}"
        case EvaluationFinished():
            return (
                f"held-out loss {event.loss:.4f}, perplexity {event.perplexity:,.2f} "
                f"over {event.tokens:,} tokens in {format_seconds(event.seconds)}"
            )
        case Notice():
            return f"note: {event.message}"
        case Incident():
            where = "" if event.step is None else f" at step {event.step}"
            return f"incident{where}: {event.kind}: {event.message}"
        case RunInterrupted():
            state = "state saved" if event.step else "nothing to save yet"
            told = f"{event.signal}: stopped after step {event.step} of {steps}, {state}"
            return told + (f", {event.seconds:.1f} s later" if event.seconds is not None else "")
        case RunFinished():
            return (
                f"finished {event.step} steps: loss {event.loss:.4f}, {event.tokens:,} tokens "
                f"in {format_seconds(event.seconds)}, {event.tokens_per_second:,.0f} tokens/s"
            )


def describe_step(event: StepFinished, *, steps: int) -> str:
    """One step's line: the same words in the same places, so that a log can be cut by columns."""
    parts = [
        f"step {event.step:>{len(str(steps))}}/{steps}",
        f"loss {event.loss:.4f}",
        f"norm {event.gradient_norm:.3f}",
        f"lr {event.learning_rate:.2e}",
        f"{event.tokens_per_second:,.0f} tokens/s",
        f"MFU {describe_share(event.model_flops_utilization)}",
        f"{format_gb(event.peak_memory_bytes)}",
        f"{format_seconds(event.seconds_left)} left",
    ]
    if event.aux_loss is not None:
        parts.insert(2, f"aux {event.aux_loss:.3f}")
    return "  ".join(parts)


def describe_routers(stats: Collection[RouterStats]) -> str:
    """The routers of all layers in a few words: the worst balanced layer, and what is wrong."""
    worst = max(stats, key=lambda layer: layer.imbalance)
    entropy = sum(layer.entropy / (layer.max_entropy or 1.0) for layer in stats) / len(stats)
    parts = [
        f"imbalance {worst.imbalance:.2f} (layer {worst.layer})",
        f"entropy {describe_share(entropy)}",
    ]
    counts = {
        "dead": sum(len(layer.dead) for layer in stats),
        "dominant": sum(len(layer.dominant) for layer in stats),
        "dropped": sum(layer.dropped_tokens for layer in stats),
    }
    return "  ".join([*parts, *(f"{name} {count}" for name, count in counts.items() if count)])


def describe_save(event: CheckpointSaved) -> str:
    """How much was written, how fast, and how long training stood still for it."""
    told = f"{format_gb(event.num_bytes)} in {format_seconds(event.seconds)}"
    if event.full_bytes:
        told = f"{event.num_bytes / event.full_bytes:.0%} of a full one, {told}"
    if event.stall_seconds is not None:
        told += f", training waited {format_seconds(event.stall_seconds)}"
    return told


def describe_memory(event: DeviceMemory) -> str:
    """Peak memory of each device in turn."""
    return "devices " + " | ".join(map(format_gb, event.peak_bytes))


def describe_share(share: float | None) -> str:
    """A share as per cent, or a dash where it is not known."""
    return "-" if share is None else f"{share:.1%}"


def _describe_start(event: RunStarted) -> str:
    peak = "peak unknown"
    if event.peak_flops_per_second:
        peak = f"peak {format_flops(event.peak_flops_per_second)}/s ({event.peak_source})"
    first = f"from step {event.first_step}" if event.first_step else "from the start"
    return (
        f"training {event.model}, {format_count(event.parameters)} parameters, {event.precision} "
        f"on {event.device}: {event.steps} steps of {event.step_tokens:,} tokens, {first}; {peak}"
    )


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
