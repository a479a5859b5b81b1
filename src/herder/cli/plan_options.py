"""What both verbs of `herder plan` take: the cluster's flags. Composition only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

COUNT = click.IntRange(min=1)


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
