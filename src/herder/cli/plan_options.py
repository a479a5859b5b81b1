"""What both verbs of `herder plan` share: the cluster's flags, and how a plan is printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click
from pydantic import BaseModel

COUNT = click.IntRange(min=1)


class FiniteRange(click.FloatRange):
    """A range of numbers. click's own lets nan into every one, and inf into open ones."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; a usage error where it is none or outside."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--nodes, --gpus-per-node and --gpu, as arguments of choose_cluster."""
    for option in (
        click.option(
            "--gpu",
            "gpu_name",
            metavar="NAME",
            help="h100-80gb, b200, mi300x, cpu ...  [default: this machine]",
        ),
        click.option("--gpus-per-node", type=COUNT, help="Devices of each.  [default: 8; cpu: 1]"),
        click.option("--nodes", type=COUNT, help="Machines.  [default: 1, or the recipe's]"),
    ):
        function = option(function)
    return function


def print_plan(plan: BaseModel, *, as_json: bool) -> None:
    """One JSON object; or a table, for which alone rich is loaded."""
    if as_json:
        click.echo(plan.model_dump_json())
    else:
        import_module("herder.plan.table").print_plan(plan)
