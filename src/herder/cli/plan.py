"""`herder plan`: the group of its verbs. Composition only."""

from __future__ import annotations

import importlib

import click

VERBS = ("serve", "train")


class PlanVerbs(click.Group):
    """A group whose verbs are modules, imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, which help describes."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        return getattr(importlib.import_module(f"herder.cli.plan_{cmd_name}"), cmd_name)


@click.group("plan", cls=PlanVerbs)
def command() -> None:
    """Memory, layout, step time and cost of training or serving a model, without running it.

    \b
    herder plan train llama-2-7b --gpu h100-80gb
    herder plan train llama-3.1-405b --nodes 2048 --gpus-per-node 8 --gpu h100-80gb
    herder plan serve llama-3.1-405b --gpu h100-80gb --context 8192
    """
