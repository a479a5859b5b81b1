"""`herder verify RECIPE|MODEL`: whether layouts compute what one process does. Composition only."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path

import click

from herder.cli.models import resolve
from herder.cli.plan_options import cluster_options
from herder.cli.plan_recipe import plan_recipe
from herder.config.detect import choose_cluster
from herder.config.load import load_run_config
from herder.errors import ConfigError
from herder.plan.training import plan_model_training
from herder.train.shrink import shrunk
from herder.train.source import find_model
from herder.train.verify_layouts import parse_layouts, scaled_down
from herder.train.verify_report import print_report, progress, report_json


@click.command("verify")
@click.argument("model", metavar="RECIPE|MODEL")
@click.argument("more", nargs=-1, metavar="")
@click.option("--layouts", multiple=True, metavar="all|LAYOUT ...", help="[default: all]")
@click.option("--plan", "of_plan", is_flag=True, help="The layout of its plan, on few ranks.")
@cluster_options
@click.option("--steps", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    more: tuple[str, ...],
    layouts: tuple[str, ...],
    of_plan: bool,
    steps: int,
    as_json: bool,
    **cluster: object,
) -> None:
    """Train a small model of the same kind in one process and in each layout, on up to 8 ranks of
    this machine; compare losses, gradients, parameters. Exit status 1 where one differs.

    A LAYOUT is tp=2,pp=2: degrees of dp, fsdp, tp, pp, cp, ep (experts, over dp, fsdp and cp);
    zero=1|2|3, schedule=1f1b, context=ring, recompute=full.

    \b
    herder verify llama-3-8b --layouts tp=2 fsdp=2,tp=2
    herder verify llama-3.1-405b --plan --nodes 2048 --gpu h100-80gb
    """
    if any(cluster.values()) and not of_plan:
        raise ConfigError("--nodes, --gpus-per-node and --gpu are of a plan: give --plan too.")
    find = partial(resolve, needs_weights=False)
    is_recipe = Path(model).suffix in (".yaml", ".yml")
    given = load_run_config(Path(model)).model if is_recipe else None
    source = find_model(given, find, needs_weights=False) if given else find(model)
    texts = [*layouts, *more] or ([] if of_plan else ["all"])
    wanted = parse_layouts(texts, has_experts=source.architecture.moe is not None)
    if of_plan:
        choose = partial(choose_cluster, **cluster)
        if is_recipe:
            _, plan = plan_recipe(model, (), choose, "simplest", None, None)
        else:
            plan = plan_model_training(source.architecture, choose(None), model=source.name)
        layout, told = scaled_down(plan, source.architecture)
        click.echo(told, err=True)
        wanted = [layout, *wanted]
    verify = import_module("herder.train.verify").verify  # and torch, which takes seconds
    with progress(len(wanted)) as watch:
        architecture = shrunk(source.architecture)
        report = verify(architecture, wanted, model=source.name, num_steps=steps, watch=watch)
    if as_json:
        click.echo(json.dumps(report_json(report)))
    else:
        print_report(report)
    report.check()
