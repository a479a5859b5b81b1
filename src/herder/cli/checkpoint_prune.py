"""`herder checkpoint prune`: let go of checkpoints by a policy. Composition only."""

from __future__ import annotations

import json
from pathlib import Path

import click

from herder.checkpoint.directory import CHECKPOINTS, locked
from herder.checkpoint.inventory import Entry, checkpoints_of, keep_by, look_at, superfluous
from herder.checkpoint.metadata import read_meta
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError
from herder.units import format_gb

_POSITIVE = click.IntRange(min=1)


@click.command("prune")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--keep-last", type=_POSITIVE, help="So many of the newest.")
@click.option("--keep-every", type=_POSITIVE, help="Those of every so many steps.")
@click.option("--keep-best", type=click.IntRange(min=0), help="So many of the best held-out loss.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prune_command(
    run: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete the checkpoints of RUN that none of these rules keeps, and say what that frees.

    A rule that is not given is as the run has it: keep_last, keep_every and keep_best of
    `checkpoint` in its config. Only checkpoints that are whole and not tainted count, and the
    newest of those is never deleted; a light one stays with a full one that keep_last keeps. A run
    that is training thins out itself: then this is refused.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{run} has no {CHECKPOINTS}/, so it is no run directory.")
    own = read_meta(run).config.get("checkpoint")
    fields = own if isinstance(own, dict) else {}
    rules = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}
    given = {name: value for name, value in rules.items() if value is not None}
    kept = {name: fields[name] for name in rules if name in fields}
    policy = CheckpointConfig.model_validate({**kept, **given})
    if dry_run:
        doomed = superfluous([look_at(path) for path in checkpoints_of(run)], policy)
    else:
        with locked(run):
            doomed = keep_by(run, policy)
    _tell(doomed, policy, dry_run=dry_run, as_json=as_json)


def _tell(doomed: list[Entry], policy: CheckpointConfig, *, dry_run: bool, as_json: bool) -> None:
    freed = sum(each.num_bytes for each in doomed)
    if as_json:
        paths = [str(each.path) for each in doomed]
        rules = policy.model_dump(include={"keep_last", "keep_every", "keep_best"})
        told = {"dry_run": dry_run, "deleted": paths, "num_bytes": freed, "policy": rules}
        click.echo(json.dumps(told))
        return
    for each in doomed:
        click.echo(f"{each.path}  {format_gb(each.num_bytes)}  {each.state}")
    verb = "would be deleted" if dry_run else "deleted"
    click.echo(f"{len(doomed)} checkpoints {verb}, {format_gb(freed)}")
