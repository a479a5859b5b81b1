"""`herder train`: run a recipe; run it again and it goes on where it stopped. Composition only."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path

import click

from herder.cli.recipe import asked_config, model_and_tokenizer
from herder.errors import PlanError
from herder.parallel.launch import shortage_of_plan
from herder.parallel.seat import seated, speaks_for_all
from herder.parallel.world import rank_from_environment, refuse_other_world
from herder.train.interrupt import StopRequest
from herder.train.prepare import describe_end, describe_plan, plan_run
from herder.train.supervise import supervise


@click.command("train")
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option(
    "--resume",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Instead of RECIPE: go on with the run in this folder, by the config it saved.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Replace one value of the recipe, for example --set train.steps=200. May be repeated.",
)
def command(recipe: Path | None, resume: Path | None, overrides: tuple[str, ...]) -> int:
    """Train the model of RECIPE in its run_directory, or go on from its newest checkpoint.
    What is other than it was then, and what that does to the losses, is told.

    A plan of several ranks is run by as many processes, which this one starts, and starts again
    when one is lost; under torchrun or srun it is one of them. Ctrl-C, SIGTERM and SIGUSR1, to this
    process or to any rank, finish the step and save; the same command then goes on with the same
    losses as if nothing had happened. Exit status 130, 143 or 138 then, 0 when all steps are done.
    """
    rank = rank_from_environment(os.environ)
    speaks = speaks_for_all(rank)
    with StopRequest(tells=speaks) as stop, seated(rank):
        given, asked = asked_config(recipe, resume, overrides)
        words = ["train", *asked]
        source, tokenizer = model_and_tokenizer(given)
        config, plan = plan_run(given, source, rank.count if rank else None)
        if rank and rank.index and rank.count != plan.layout.num_ranks:
            return PlanError.exit_status  # the first rank says why
        if rank:
            refuse_other_world(plan.mesh_axes, rank.count)
        if speaks:
            click.echo(describe_plan(config, plan), err=True)
            click.echo(shortage_of_plan(plan), err=True, nl=False)
        if rank is None and plan.layout.num_ranks > 1:
            return supervise(given, source, words, stop, say=partial(click.echo, err=True))
        # Read by torch as it starts: large blocks in huge pages. Faults of small ones are 4 % of a
        # CPU's step.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # torch takes seconds to import: the plan is shown and signals are caught by now.
        from herder.train.session import run_training

        outcome = run_training(config, source, plan, tokenizer=tokenizer, stop=stop, rank=rank)
    again = shlex.join(["herder", *words]) if outcome.stopped_by else None
    if rank is None or rank.index == 0:
        click.echo(describe_end(config, outcome.step, again))
    return 128 + outcome.stopped_by if outcome.stopped_by else 0
