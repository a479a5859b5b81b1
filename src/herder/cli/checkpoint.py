"""`herder checkpoint`: the group of its verbs. Composition only."""

from __future__ import annotations

import importlib

import click

VERBS = {
    "list": "What is saved, how old and large it is, and which of it is good.",
    "verify": "Read everything, and name each file that is not as it was written.",
    "prune": "Delete what no rule keeps, and say what that frees.",
    "diff": "In what two checkpoints differ: config, plan, versions, every tensor.",
}


class CheckpointVerbs(click.Group):
    """A group whose verbs are modules, imported when they are called: listing needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, which help describes."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"herder.cli.checkpoint_{cmd_name}")
        return getattr(module, f"{cmd_name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group("checkpoint", cls=CheckpointVerbs)
def command() -> None:
    """Look at, check, thin out and compare the checkpoints of a run.

    \b
    herder checkpoint list runs/debug
    herder checkpoint verify runs/debug
    herder checkpoint prune runs/debug --keep-last 1 --dry-run
    herder checkpoint diff runs/debug/checkpoints/step-00000025 runs/debug

    RUN is a run directory, CHECKPOINT a folder step-... (all that a run needs to go on) or
    light-... (weights only, as what changed since a full one) of its checkpoints/. Exit status 0
    where all is well, 1 where something is damaged or differs, 2 for a mistake of the user's.
    """
