"""A progress bar on stderr for work that takes more than a moment; silent where no one watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress(
    description: str, total: float | None, *, bytes_counted: bool = False
) -> Generator[Callable[[float], None]]:
    """Show a bar while the block runs; the yielded function is told how much is done in all.

    `total` None: the amount is unknown and the bar only moves. Stdout is never written to.
    """
    amount = DownloadColumn() if bytes_counted else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), amount)
    console = Console(file=sys.stderr)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)
