"""`herder parity`: whether a model computes here what it does elsewhere. Composition only."""

from __future__ import annotations

import json
from pathlib import Path

import click

from herder.checkpoint.huggingface import load_decoder
from herder.cli.models import resolve
from herder.errors import CheckFailedError
from herder.evaluate.golden import read_golden
from herder.evaluate.parity import compare, report_json, report_text
from herder.evaluate.transformers_reference import made_by_transformers


@click.command("parity")
@click.argument("model")
@click.option(
    "--golden",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of stored input_ids, attention_mask, position_ids, logits, greedy and "
    "hidden_row0 (.npy). Absent: transformers computes them now.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the tokens made up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, golden: Path | None, seed: int, as_json: bool) -> None:
    """Compare MODEL's logits, layers and greedy tokens with transformers, or with stored ones.

    Runs in fp32 on the CPU. Also compares cached with uncached and packed with separate texts. Exit
    status 1 where logits differ by more than 1e-4 (of 16, where they are larger than that) or a
    greedy token differs.
    """
    source = resolve(model)
    decoder = load_decoder(source).eval()
    if golden is None:
        reference = made_by_transformers(source, decoder, seed=seed)
    else:
        reference = read_golden(golden)
    report = compare(decoder, reference)
    if as_json:
        click.echo(json.dumps(report_json(report, model=source.name)))
    else:
        click.echo(report_text(report, model=source.name))
    if not report.passed:
        raise CheckFailedError(f"{source.name} does not match {report.reference}.")
