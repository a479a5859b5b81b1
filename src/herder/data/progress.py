"""A progress bar on stderr for work that takes more than a moment; silent where no one watches."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress(description: str, total: float) -> Generator[Callable[[float], None]]:
    """Show a bar while the block runs; the yielded function is told how much is done in all.

    Stdout is never written to.
    """
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)
