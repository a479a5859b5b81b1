"""`herder checkpoint diff`: in what two checkpoints differ. Composition only."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from herder.checkpoint.compare import Comparison, compare_checkpoints, comparison_json
from herder.checkpoint.directory import CHECKPOINTS, newest_checkpoint
from herder.checkpoint.inventory import checkpoints_at
from herder.checkpoint.manifest import num_bytes_of
from herder.data.progress import progress
from herder.errors import CheckpointError


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--max-tensors", type=click.IntRange(min=1), default=20, show_default=True, help="In the table."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all tensors.")
def diff_command(a: Path, b: Path, max_tensors: int, as_json: bool) -> int:
    """Compare checkpoints A and B: config, plan, versions, and every value of every tensor.

    A and B are folders step-... or light-..., or run directories, which stand for their newest good
    checkpoint. The layouts that wrote them may differ. Of a light one only weights are compared. A
    relative difference is the largest absolute one over the tensor's largest magnitude. Exit status
    1 where anything differs.
    """
    a, b = _checkpoint(a), _checkpoint(b)
    done = 0
    with progress("comparing", min(num_bytes_of(a), num_bytes_of(b))) as show:

        def hear(num_bytes: int) -> None:
            nonlocal done
            show(done := done + num_bytes)

        found = compare_checkpoints(a, b, on_bytes=hear)
    if as_json:
        click.echo(json.dumps({"a": str(a), "b": str(b), **comparison_json(found)}))
    else:
        click.echo(f"A {a}\nB {b}")
        _show(found, max_tensors)
    return int(not found.is_same)


def _checkpoint(place: Path) -> Path:
    if not (place / CHECKPOINTS).is_dir():
        return checkpoints_at(place)[0]
    newest = newest_checkpoint(place)
    if newest is None:
        raise CheckpointError(f"{place}: this run has no checkpoint yet.")
    return newest


def _show(found: Comparison, max_tensors: int) -> None:
    for part in ("config", "plan", "versions"):
        for key, (old, new) in getattr(found, part).items():
            click.echo(f"{part} {key}: {json.dumps(old)} in A, {json.dumps(new)} in B")
    lines = [f"{name} is only in A" for name in found.only_in_a]
    lines += [f"{name} is only in B" for name in found.only_in_b]
    for line in (*lines, *found.misshapen):
        click.echo(line)
    table = Table("tensor", "differing", "max absolute", "max relative", box=None, pad_edge=False)
    for each in found.tensors[:max_tensors]:
        share = f"{each.num_differing:,} of {each.num_values:,}"
        sizes = (f"{each.largest_absolute:.3g}", f"{each.largest_relative:.3g}")
        table.add_row(each.name, share, *sizes)
    if found.tensors:
        Console().print(table)
    kind = "tensors of the model" if found.weights_only else "tensors"
    click.echo(f"{len(found.tensors)} of {found.num_compared} {kind} differ")
