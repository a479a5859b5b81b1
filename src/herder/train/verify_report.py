"""What `herder verify` found: a cell a layout, what is tolerated and why, the matrix that is shown.

Owns tolerances and verdicts. How layouts are run is verify's affair. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from herder.errors import CheckFailedError, PlanError

TOLERANCES: dict[str, tuple[float, str]] = {
    "loss": (
        1e-5,
        "of itself, at any step. Sums of fp32 in another order differ by some 1e-7, and each step "
        "adds to that; a missing sum or token is 1e-3 and more.",
    ),
    "norm": (1e-5, "of itself. It is of all gradients together, and the largest ones decide it."),
    "gradient": (
        1e-4,
        "of the parameter's largest gradient, or of a hundredth of the model's largest where that "
        "is more: a key's bias has a gradient of 0 but for rounding.",
    ),
    "parameter": (
        1e-4,
        "of how far the farthest parameter moved. AdamW divides by a gradient's own size, so that "
        "the rounding of small gradients weighs more here than in the loss.",
    ),
}
"""What a cell may differ by, and why it may. In fp32; taken over all ranks and steps."""

WIDE_COLUMNS = 110
"""From here on there is room for the name of the parameter whose gradient is furthest off."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout against one process. Differences are None where it was not run to its end."""

    layout: str
    ranks: int
    max_relative_loss_difference: float | None = None
    max_relative_norm_difference: float | None = None
    max_gradient_difference: float | None = None
    worst_parameter: str | None = None
    """Whose gradient differs most."""
    max_parameter_difference: float | None = None
    refused: str | None = None
    """Why the planner has no such layout."""
    error: str | None = None
    """What ended a rank."""

    @property
    def differences(self) -> dict[str, float | None]:
        """By the name of their tolerance."""
        return {
            "loss": self.max_relative_loss_difference,
            "norm": self.max_relative_norm_difference,
            "gradient": self.max_gradient_difference,
            "parameter": self.max_parameter_difference,
        }

    def is_within(self, name: str) -> bool:
        """Whether this difference is there and tolerated; one that is not a number is not."""
        difference = self.differences[name]
        return difference is not None and difference <= TOLERANCES[name][0]

    @property
    def passed(self) -> bool:
        return all(map(self.is_within, TOLERANCES))

    @property
    def failed(self) -> bool:
        return not self.passed and self.refused is None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All layouts of one model."""

    model: str
    losses: tuple[float, ...]
    """Of one process, step by step."""
    cells: tuple[Cell, ...]

    @property
    def loss_fell(self) -> bool:
        """Whether the model learned: one that stands still hides a wrong update."""
        return self.losses[-1] < 0.98 * self.losses[0]

    @property
    def problem(self) -> str | None:
        """Why this is no proof, or None."""
        failed = [cell.layout for cell in self.cells if cell.failed]
        if failed:
            return f"{self.model} is not the same model under {' and '.join(failed)}."
        if not self.loss_fell:
            first, last = self.losses[0], self.losses[-1]
            return (
                f"The loss of {self.model} did not fall ({first:.4f} to {last:.4f}): equal numbers "
                "would show nothing. Give more --steps."
            )
        return None

    def check(self) -> None:
        """Raise CheckFailedError where this is no proof, PlanError where nothing was run at all."""
        if all(cell.refused is not None for cell in self.cells):
            notes = "\n".join(report_notes(self))
            raise PlanError(f"No layout can be run, so nothing was compared.\n{notes}")
        if self.problem is not None:
            raise CheckFailedError(self.problem)


def report_json(report: Report) -> dict[str, Any]:
    """One object; a difference that is not a number is null."""

    def told(cell: Cell) -> dict[str, Any]:
        fields = {name: None if value != value else value for name, value in asdict(cell).items()}
        return {**fields, "passed": cell.passed}

    return {
        "model": report.model,
        "steps": len(report.losses),
        "losses": report.losses,
        "tolerances": {name: value for name, (value, _) in TOLERANCES.items()},
        "cells": [told(cell) for cell in report.cells],
    }


def print_report(report: Report) -> None:
    """The matrix, then a line on each layout that is not equal."""
    console = Console()
    console.print(report_table(report, num_columns=console.width))
    for note in report_notes(report):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def report_table(report: Report, *, num_columns: int) -> Table:
    """A row a layout; what is over its tolerance stands out. A wide one names parameters too."""
    first, last = report.losses[0], report.losses[-1]
    table = Table(
        title=f"{report.model}: {len(report.losses)} steps, loss {first:.4f} to {last:.4f}",
        caption="Largest differences from one process, in fp32. Tolerated: "
        + ", ".join(f"{name} {value:.0e}" for name, (value, _) in TOLERANCES.items()),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    is_wide = num_columns >= WIDE_COLUMNS
    names = ["ranks", "loss", "norm", "gradient", *(["worst"] if is_wide else []), "params"]
    table.add_column("layout", min_width=25)
    for name in names:
        justify: JustifyMethod = "left" if name == "worst" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=len(name))
    table.add_column("", no_wrap=True)
    for cell in report.cells:
        told = [str(cell.ranks), *map(_shown, cell.differences.items())]
        if is_wide:
            told.insert(4, cell.worst_parameter or "")
        layout = cell.layout.replace(",", ", ")  # where a line may break
        table.add_row(layout, *told, _verdict(cell))
    return table


def report_notes(report: Report) -> list[str]:
    """Why layouts were refused, and what was wrong with those that failed; one reason once."""
    layouts = dict[str, list[str]]()
    for cell in report.cells:
        note = _note(cell)
        if note is not None:
            layouts.setdefault(note, []).append(cell.layout)
    return [f"{' and '.join(names)}: {note}" for note, names in layouts.items()]


def _note(cell: Cell) -> str | None:
    if cell.refused is not None:
        return f"refused. {cell.refused}"
    if cell.error is not None:
        return f"FAILED. {cell.error}"
    over = [name for name in TOLERANCES if not cell.is_within(name)]
    if not over:
        return None
    return (
        f"FAILED by {' and '.join(over)}; the gradient that is furthest off is that of "
        f"{cell.worst_parameter}"
    )


def _shown(item: tuple[str, float | None]) -> str:
    name, difference = item
    if difference is None:
        return "-"
    is_fine = difference <= TOLERANCES[name][0]
    return f"{difference:.1e}" if is_fine else f"[bold red]{difference:.1e}[/]"


def _verdict(cell: Cell) -> str:
    if cell.refused is not None:
        return "[dim]refused[/]"
    return "[green]equal[/]" if cell.passed else "[bold red]FAILED[/]"


Watch = Callable[[str, int], None]
"""Told of each layout and its ranks before it is run."""


@contextmanager
def progress(num_layouts: int) -> Generator[Watch]:
    """A bar on stderr while layouts are run, on a terminal only; it is gone afterwards."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("one process", total=num_layouts + 1)

        def watch(layout: str, num_ranks: int) -> None:
            bar.update(task, advance=1, description=f"{layout}, {num_ranks} ranks")

        yield watch
