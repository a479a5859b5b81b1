"""The live display of a run on a terminal: where it is, how it learns, how fast, how long still.

Readable at 80 columns. Always on the stream it is given (stderr: stdout belongs to results), and
only where that is a terminal; elsewhere the same events become plain lines (`sinks.LineSink`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from herder.observe.events import (
    CheckpointSaved,
    DeviceMemory,
    EvaluationFinished,
    Event,
    RouterStats,
    RunStarted,
    Sink,
    StepFinished,
)
from herder.observe.sinks import (
    LineSink,
    describe,
    describe_memory,
    describe_routers,
    describe_save,
    describe_share,
)
from herder.units import format_count, format_gb, format_seconds

_BARS = "▁▂▃▄▅▆▇█"
_LABEL_COLUMNS = 10
_SPARK_COLUMNS = 32
_REFRESHES_PER_SECOND = 10


def progress_sinks(
    progress: Literal["auto", "live", "plain", "none"], stream: TextIO
) -> list[Sink]:
    """The sinks that show progress on `stream` as asked; `auto` looks whether it is a terminal."""
    if progress == "none":
        return []
    live = progress == "live" or (progress == "auto" and stream.isatty())
    return [LiveConsole(stream) if live else LineSink(stream)]


def sparkline(values: list[float], *, columns: int, lowest: float | None = None) -> str:
    """Values as bars, newest right; neighbours share a column as a mean.

    Scaled to their own range, or from `lowest` on. Values that are not finite are left out.
    """
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    columns = min(columns, len(finite))
    edges = [len(finite) * column // columns for column in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(means) if lowest is None else lowest
    span = max(means) - low
    top = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / span * top) if span else 0] for mean in means)


class LiveConsole:
    """A display that is redrawn in place, with what is rare (notices, incidents) scrolled above it.

    It draws when an event comes and has no thread of its own, so it costs nothing during a step.
    """

    def __init__(self, stream: TextIO) -> None:
        console = Console(file=stream, force_terminal=True)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
        self._started: RunStarted | None = None
        self._step: StepFinished | None = None
        self._losses: deque[float] = deque(maxlen=1024)
        self._saved: CheckpointSaved | None = None
        self._evaluated: EvaluationFinished | None = None
        self._routers = dict[int, RouterStats]()
        self._memory: DeviceMemory | None = None
        self._drawn_at = 0.0

    def receive(self, event: Event, *, unix_seconds: float) -> None:
        """Keep what the display shows, redraw it, or print a line above it."""
        match event:
            case RunStarted():
                self._started = event
                self._live.start()
                self._print(event)
            case StepFinished():
                self._step = event
                self._losses.append(event.loss)
            case RouterStats():
                self._routers[event.layer] = event
            case DeviceMemory():
                self._memory = event
            case CheckpointSaved():
                self._saved = event
            case EvaluationFinished():
                self._evaluated = event
            case _:
                self._print(event)
        now = time.perf_counter()
        if now - self._drawn_at >= 1 / _REFRESHES_PER_SECOND:
            self._drawn_at = now
            self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        """Draw the last state, leave it standing and give the terminal back."""
        if self._live.is_started:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _print(self, event: Event) -> None:
        steps = self._started.steps if self._started else 0
        self._live.console.print(Text(describe(event, steps=steps)), highlight=False)

    def _render(self) -> Group:
        started, step = self._started, self._step
        if started is None:
            return Group()
        done = step.step if step else started.first_step
        left = f"{format_seconds(step.seconds_left)} left" if step else "first step"
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(style="dim", min_width=_LABEL_COLUMNS)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row("step", _progress_row(done, started.steps, left))
        if step:
            spark = sparkline(list(self._losses), columns=_SPARK_COLUMNS)
            table.add_row("loss", Text.assemble((f"{step.loss:.4f}  ", "bold"), (spark, "cyan")))
            table.add_row("learning", _learning_row(step))
            table.add_row("speed", _speed_row(step))
        if self._routers:
            table.add_row("routers", describe_routers(self._routers.values()))
            table.add_row("experts", _experts_row(self._routers))
        if self._memory:
            table.add_row("memory", describe_memory(self._memory))
        if self._evaluated:
            table.add_row("held out", _evaluation_row(self._evaluated))
        if self._saved:
            table.add_row("checkpoint", _checkpoint_row(self._saved))
        title = f"{started.model}  {format_count(started.parameters)}  {started.precision}  "
        return Group(Text(title + started.device, style="bold"), table)


def _progress_row(done: int, steps: int, left: str) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(f"{done}/{steps}", ProgressBar(total=steps, completed=done, width=28), left)
    return row


def _learning_row(step: StepFinished) -> str:
    return f"gradient norm {step.gradient_norm:.3f}   rate {step.learning_rate:.2e}"


def _speed_row(step: StepFinished) -> str:
    share = describe_share(step.model_flops_utilization)
    memory = format_gb(step.peak_memory_bytes)
    return f"{step.tokens_per_second:,.0f} tokens/s   MFU {share}   peak memory {memory}"


def _experts_row(routers: dict[int, RouterStats]) -> Text:
    """How the worst balanced layer's tokens are spread: a bar an expert, neighbours together."""
    worst = max(routers.values(), key=lambda layer: layer.imbalance)
    bars = sparkline(list(map(float, worst.selections)), columns=_SPARK_COLUMNS, lowest=0)
    return Text.assemble(f"layer {worst.layer}  ", (bars, "cyan"))


def _evaluation_row(event: EvaluationFinished) -> str:
    return f"loss {event.loss:.4f}   perplexity {event.perplexity:,.2f}   at step {event.step}"


def _checkpoint_row(event: CheckpointSaved) -> str:
    return f"step {event.step}   {describe_save(event)}"
