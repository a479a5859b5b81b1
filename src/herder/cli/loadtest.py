"""`herder loadtest URL`: what a server does under load. Composition only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from herder.cli.loadtest_options import loadtest_options
from herder.cli.models import PACKAGED, resolve
from herder.config.catalog import catalog_name
from herder.config.detect import choose_cluster
from herder.data.progress import progress
from herder.plan.serving import ServingPlan
from herder.serve.load_client import Asked
from herder.serve.load_report import load_plot, load_table, plan_line, plan_of
from herder.serve.loadtest import Load, LoadTest


@click.command("loadtest")
@click.argument("url")
@loadtest_options
def command(
    url: str,
    concurrency: tuple[int, ...],
    rate: tuple[float, ...],
    requests: int,
    as_json: bool,
    plot: Path | None,
    cluster: dict[str, Any],
    target: dict[str, Any],
    **asked: Any,
) -> int:
    """Measure the OpenAI-compatible server at URL: one load after the other, the same each time.

    Only standard fields are sent, so that any server can be measured. With --rate requests arrive
    by chance (a Poisson process), whether the server keeps up or not; otherwise so many are always
    under way. Where the server's model is in the catalog, the serving plan stands beside it. Exit
    status 1 where no request succeeded.

    \b
    herder loadtest http://127.0.0.1:8000 --concurrency 1,4,16 --prompt-tokens 128,512
    herder loadtest http://127.0.0.1:8000 --rate 0.5,1,2 --plot load.svg
    """
    loads = [Load(None, each) for each in rate] or [Load(each, None) for each in concurrency]
    test = LoadTest(url, Asked(**asked), loads, requests, **target)
    with progress(f"loading {url}", requests * len(loads)) as show:
        card, results = test.run(show)
    plan = _plan(card, cluster)
    if plot is not None:
        plot.write_text(load_plot(results, model=card["id"]), encoding="utf-8")
    if as_json:
        holds = None if plan is None else plan.max_concurrent_sequences
        told = {"model": card["id"], "plan_max_concurrent_sequences": holds}
        click.echo(json.dumps({**told, "loads": list(map(asdict, results))}))
    else:
        Console().print(load_table(results, model=card["id"]))
        click.echo(plan_line(results, plan))
    return int(all(sum(each.errors.values()) == each.num_requests for each in results))


def _plan(card: dict[str, Any], cluster: dict[str, Any]) -> ServingPlan | None:
    """How the catalog's model of the same name would be served; None where there is none."""
    name = card["id"].lower()
    known = name if name in PACKAGED else catalog_name(name.rpartition("/")[2])
    if known is None:
        return None
    source = resolve(known, needs_weights=False)
    return plan_of(source, choose_cluster(None, **cluster), card.get("max_model_len"))
