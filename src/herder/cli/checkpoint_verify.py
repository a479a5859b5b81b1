"""`herder checkpoint verify`: is what is saved still as it was written? Composition only."""

from __future__ import annotations

import json
from pathlib import Path

import click

from herder.checkpoint.inventory import checkpoints_at, look_at
from herder.checkpoint.manifest import base_of, num_bytes_of
from herder.cli.checkpoint_list import to_json
from herder.data.progress import progress
from herder.units import format_gb


@click.command("verify")
@click.argument("place", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(place: Path, as_json: bool) -> int:
    """Read every file of the checkpoints of RUN, or of one CHECKPOINT, and compare its sha256.

    Names each file that is missing, cut short or changed, and exits with status 1 where there is
    one. With a light checkpoint the full one that it rests on is read too. Nothing is changed: a
    damaged checkpoint is passed over, and set aside when the run goes on.
    """
    paths = checkpoints_at(place)
    bases = [base for path in paths if (base := base_of(path)) is not None]
    total, entries, done = sum(map(num_bytes_of, [*paths, *bases])), [], 0
    with progress(f"verifying {format_gb(total)}", total) as show:

        def hear(num_bytes: int) -> None:
            nonlocal done
            show(done := done + num_bytes)

        for path in paths:
            entries.append(look_at(path, reads_contents=True, on_bytes=hear))
    if as_json:
        told = {"num_bytes": done, "checkpoints": [to_json(each) for each in entries]}
        click.echo(json.dumps(told))
    for each in () if as_json else entries:
        click.echo(f"{each.path}: {'damaged' if each.damage else 'as it was written'}")
        for problem in each.damage:
            click.echo(f"  {problem}")
    if not as_json:
        click.echo(f"{len(entries)} checkpoints, {format_gb(done)} read")
    return int(any(each.damage for each in entries))
