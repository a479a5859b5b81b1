"""`herder train RECIPE`: run it; run it again and it goes on where it stopped. Composition only."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from herder.cli import models
from herder.config.load import load_run_config
from herder.config.run import RunConfig
from herder.train.interrupt import StopRequest
from herder.train.prepare import describe_end, describe_plan, plan_run
from herder.train.source import find_model


@click.command("train")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Replace one value of the recipe, for example --set train.steps=200. May be repeated.",
)
def command(recipe: Path, overrides: tuple[str, ...]) -> int:
    """Train the model of RECIPE in its run_directory, or go on from its newest checkpoint.

    Ctrl-C and SIGTERM finish the step and save; the same command then goes on with the same losses
    as if nothing had happened. Exit status 130 or 143 then, 0 when all steps are done.
    """
    with StopRequest() as stop:
        config = load_run_config(recipe, overrides)
        source = find_model(config.model, lambda name: _resolve(config, name))
        if config.data.tokenizer is None:
            tokenizer = models.tokenizer_folder(source)
        else:
            tokenizer = models.recipe_tokenizer(config)
        config, plan = plan_run(config, source)
        click.echo(describe_plan(config, plan), err=True)
        # torch takes seconds to import: the plan is shown and signals are caught by now.
        from herder.train.session import run_training

        outcome = run_training(config, source, plan, tokenizer=tokenizer, stop=stop)
    given = (word for override in overrides for word in ("--set", override))
    again = shlex.join(["herder", "train", str(recipe), *given])
    click.echo(describe_end(config, outcome.step, again if outcome.stopped_by else None))
    return stop.exit_status if outcome.stopped_by else 0


def _resolve(config: RunConfig, reference: str) -> models.ModelSource:
    """Weights are fetched only where they, or a tokenizer packed with them, are needed."""
    packed = reference.lower() in models.PACKAGED and config.data.tokenizer is None
    return models.resolve(
        reference, needs_weights=packed or config.model.initialize == "pretrained"
    )
