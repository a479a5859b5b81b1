"""`herder plan`: the group of its verbs. Composition only."""

from __future__ import annotations

import click

from herder.cli.plan_serve import serve
from herder.cli.plan_train import train


@click.group("plan")
def command() -> None:
    """Memory, layout, step time and cost of training or serving a model, without running it.

    \b
    herder plan train llama-2-7b --gpu h100-80gb
    herder plan train llama-3.1-405b --nodes 2048 --gpus-per-node 8 --gpu h100-80gb
    herder plan serve llama-3.1-405b --gpu h100-80gb --context 8192
    """


command.add_command(train)
command.add_command(serve)
