"""`herder data inspect`: a corpus, or what a step of a run read. Composition only."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from herder.checkpoint.metadata import read_meta
from herder.cli.data_prepared import prepared, show_summary
from herder.config.load import load_run_config
from herder.config.run import RunConfig
from herder.data.dataset import TokenDataset
from herder.data.evidence import evidence_view, read_at
from herder.data.inspection import row_view
from herder.data.order import step_rows
from herder.errors import ConfigError, DataError


@click.command("inspect")
@click.argument("recipe", metavar="RECIPE|RUN", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE")
@click.option("--row", type=click.IntRange(0, 2**62), default=0, help="Which row to show.")
@click.option(
    "--step",
    type=click.IntRange(1, 2**62),
    help="Show instead what this step read, counted as the log does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_command(
    recipe: Path, overrides: tuple[str, ...], row: int, step: int | None, *, as_json: bool
) -> None:
    """Show the corpus of RECIPE, or what a step of RUN read.

    Lengths, packing, and one row as text, in reading order. With --step the documents of that very
    batch, on all ranks, by file and offset: what to look at after a spike of the loss.
    """
    config, fingerprint = _config(recipe, overrides)
    tokenizer, corpus, packed = prepared(config)
    if fingerprint is not None and fingerprint != corpus.fingerprint:
        raise DataError(
            f"{recipe} read other documents than {config.data.source} holds now, or with another "
            f"tokenizer: their fingerprint was {fingerprint[:12]}, it is {corpus.fingerprint[:12]}."
        )
    if step is None:
        show_summary(corpus, packed, as_json=as_json)
        if not as_json:
            order = {"num_rows": packed.num_rows, "seed": config.train.seed}
            (place,) = step_rows(row, rows_per_step=1, **order)
            click.echo(f"\nRow {row}, which is packed as number {place}:")
            Console().print(row_view(packed, corpus.train, tokenizer, int(place)))
        return
    sizes = config.train.micro_batch_size, config.train.global_batch_tokens
    if None in sizes:
        raise ConfigError(
            f"--step: {recipe} leaves the size of a step to the plan. Give the directory of the "
            "run, or set train.micro_batch_size and train.global_batch_tokens."
        )
    size, tokens = map(int, filter(None, sizes))
    made = {"micro_batch_size": size, "global_batch_tokens": tokens, "seed": config.train.seed}
    pieces = read_at(step - 1, TokenDataset(packed, **made), corpus, config.data, tokenizer)
    told = {"step": step, "documents": [piece.told() for piece in pieces]}
    click.echo(json.dumps(told)) if as_json else Console().print(evidence_view(pieces))


def _config(recipe: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, str | None]:
    """(config, the fingerprint of what a run read)."""
    if not recipe.is_dir():
        return load_run_config(recipe, overrides), None
    if overrides:
        raise ConfigError("--set: a run read what it was started with. Give its recipe instead.")
    meta = read_meta(recipe)
    return RunConfig.model_validate(meta.config), meta.corpus
