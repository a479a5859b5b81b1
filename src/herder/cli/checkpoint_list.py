"""`herder checkpoint list`: what is saved of a run. Composition only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from herder.checkpoint.inventory import Entry, checkpoints_at, look_at
from herder.units import format_gb, format_seconds


@click.command("list")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--verify", "reads_contents", is_flag=True, help="Read and compare all contents.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(run: Path, reads_contents: bool, as_json: bool) -> int:
    """List the checkpoints of RUN, oldest first, and say which of them are good.

    Looks at which files there are and how long they are; `herder checkpoint verify` reads them. A
    tainted one is whole, but was written while the run looked broken: it is used only by name. Exit
    status 1 where one is damaged.
    """
    entries = [look_at(path, reads_contents=reads_contents) for path in checkpoints_at(run)]
    if as_json:
        click.echo(json.dumps({"run": str(run), "checkpoints": [to_json(x) for x in entries]}))
    elif not entries:
        click.echo(f"{run} has no checkpoint yet.")
    else:
        Console().print(_table(entries))
    return int(any(each.damage for each in entries))


def to_json(entry: Entry) -> dict[str, Any]:
    """A checkpoint under its fields' names."""
    return {
        "path": str(entry.path),
        "step": entry.step,
        "kind": entry.kind,
        "num_bytes": entry.num_bytes,
        "unix_seconds": entry.unix_seconds,
        "state": entry.state,
        "damage": entry.damage,
        "tainted": entry.verdict.tainted,
        "held_out_loss": entry.verdict.held_out_loss,
        "base": entry.base,
    }


def _table(entries: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "kind", "size", "age", "held-out loss"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for each in entries:
        written, loss = each.unix_seconds, each.verdict.held_out_loss
        reason = "; ".join(each.damage) or each.verdict.tainted
        table.add_row(
            str(each.step),
            each.kind,
            format_gb(each.num_bytes),
            "-" if written is None else format_seconds(max(time.time() - written, 0)),
            "-" if loss is None else f"{loss:.4f}",
            f"{each.state}: {reason}" if reason else each.state,
        )
    return table
