"""`herder plan train MODEL|RECIPE`. Composition only; what a recipe needs is loaded with one."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import click

from herder.cli.models import resolve
from herder.cli.plan_dry_run import print_dry_run
from herder.cli.plan_options import COUNT, FiniteRange, cluster_options, print_plan
from herder.config.detect import choose_cluster
from herder.errors import ConfigError
from herder.plan.training import Objective, plan_model_training


@click.command("train")
@click.argument("model")
@cluster_options
@click.option("--sequence-length", type=COUNT, help="Tokens.  [default: 8192, or the window]")
@click.option("--global-batch-tokens", type=COUNT, help="Tokens a step.  [default: about 4M]")
@click.option("--objective", type=click.Choice(["simplest", "fastest"]), default="simplest")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a RECIPE.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write a RECIPE's design.md.")
@click.option("--gpu-hour-price", type=FiniteRange(min=0), help="For the cost in design.md.")
@click.option("--dry-run", "is_tried", is_flag=True, help="Build one rank of it, without memory.")
@click.option("--rank", type=click.IntRange(min=0), help="Of --dry-run.  [default: the heaviest]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def train(
    model: str,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu_name: str | None,
    sequence_length: int | None,
    global_batch_tokens: int | None,
    objective: Objective,
    overrides: tuple[str, ...],
    output: Path | None,
    gpu_hour_price: float | None,
    is_tried: bool,
    rank: int | None,
    as_json: bool,
) -> None:
    """How to train MODEL (a name, folder, hub id, .gguf, or a recipe's .yaml), and what it takes.

    \b
    herder plan train llama-3-8b --nodes 4 --gpu h100-80gb --objective fastest
    herder plan train recipes/demo.yaml -o design.md --gpu-hour-price 2.50
    """
    flags = {"sequence_length": sequence_length, "global_batch_tokens": global_batch_tokens}
    choose = partial(choose_cluster, nodes=nodes, gpus_per_node=gpus_per_node, gpu_name=gpu_name)
    if gpu_hour_price is not None and output is None:
        raise ConfigError("--gpu-hour-price is for the design: give -o design.md too.")
    if rank is not None and not is_tried:
        raise ConfigError("--rank says which rank is built: give --dry-run too.")
    if Path(model).suffix in (".yaml", ".yml"):
        given = [f"train.{name}={value}" for name, value in flags.items() if value is not None]
        architecture, plan = import_module("herder.cli.plan_recipe").plan_recipe(
            model, [*overrides, *given], choose, objective, output, gpu_hour_price
        )
        if output is not None:
            click.echo(f"The design is in {output}.", err=True)
    elif overrides or output:
        raise ConfigError(f"--set and -o go with a recipe's .yaml file; {model!r} is a model.")
    else:
        source = resolve(model, needs_weights=False)
        architecture = source.architecture
        plan = plan_model_training(
            architecture, choose(None), model=source.name, objective=objective, **flags
        )
    if is_tried:
        print_dry_run(architecture, plan, rank, as_json=as_json)
    else:
        print_plan(plan, as_json=as_json)
