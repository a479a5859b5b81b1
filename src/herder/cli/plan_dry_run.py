"""`herder plan train ... --dry-run`: one rank of the plan, built without its cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import click

from herder.cli.plan_options import print_plan
from herder.config.architecture import ArchitectureConfig
from herder.errors import CheckFailedError, PlanError
from herder.plan.training import TrainingPlan
from herder.units import format_gb

if TYPE_CHECKING:
    from herder.parallel.dry_run import DryRun


def print_dry_run(
    architecture: ArchitectureConfig, plan: TrainingPlan, rank: int | None, *, as_json: bool
) -> None:
    """The plan, and what a rank of it (None: the heaviest) holds; torch is loaded for this alone.

    Raises PlanError for a rank that there is not and a plan that cannot be run, CheckFailedError
    where another number of bytes is allocated than was planned.
    """
    num_ranks = plan.layout.num_ranks
    if rank is not None and rank >= num_ranks:
        raise PlanError(
            f"--rank {rank}: the plan has {num_ranks:,} rank{'s' if num_ranks > 1 else ''} "
            f"({plan.layout.told()}), counted from 0. Give --rank 0 to {num_ranks - 1}, or leave "
            "it out for the heaviest."
        )
    told = f"rank {rank}" if rank is not None else "its heaviest rank"
    click.echo(
        f"dry run: building {plan.model} on the meta device in a world of {num_ranks:,}, as {told}",
        err=True,
    )
    dry_run = import_module("herder.parallel.dry_run")
    found: DryRun = dry_run.dry_run(
        architecture, plan, dry_run.heaviest_rank(plan) if rank is None else rank
    )
    if as_json:
        both = {**plan.model_dump(mode="json"), "dry_run": found.model_dump(mode="json")}
        click.echo(json.dumps(both))
    else:
        print_plan(plan, as_json=False)
        click.echo("\n".join(_lines(found)))
    if found.unexplained_bytes:
        raise CheckFailedError(
            f"dry run: rank {found.rank} allocates {found.unexplained_bytes:+,} bytes beside the "
            "planner's figure. One of the two is wrong: please report it with this command."
        )


def _lines(found: DryRun) -> Iterator[str]:
    place = ", ".join(f"{axis} {index}" for axis, index in found.coordinates.items())
    yield f"\nDry run of rank {found.rank:,} of {found.num_ranks:,} ({place})"
    yield (
        f"  parameters  {found.parameter_bytes:,} bytes in {found.num_tensors:,} tensors, in fp32, "
        "read from them"
    )
    yield f"  planned     {found.planned_parameter_bytes:,} bytes on the largest rank of its stage"
    missing = found.planned_parameter_bytes - found.parameter_bytes
    reason = "none"
    if missing:
        reason = f"{missing:,} bytes, {found.padding_bytes:,} of them padding of uneven shards"
    yield f"  difference  {reason}"
    yield f"  took {found.seconds:.1f} s and {format_gb(found.peak_memory_bytes)} of memory"
