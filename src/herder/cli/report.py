"""`herder report RUN_DIR`: what happened to a run, from its files alone. Composition only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from herder.observe.run_report import report_run


@click.command("report")
@click.argument("run_directory", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_directory: Path, as_json: bool) -> None:
    """Tell where the run in RUN_DIR stands and how it ended.

    Of a run with observe.trace_collectives=true that hangs, or was killed, also the rank that is
    behind, the collective that it did not come to, and where its peers wait. Exit status 0 whatever
    is told, 2 where RUN_DIR is no run directory.
    """
    report = report_run(run_directory)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        click.echo("\n".join(report.lines()))
