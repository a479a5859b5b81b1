"""`--set` on commands that read a model: fields of its architecture, replaced. Composition only."""

from __future__ import annotations

from dataclasses import replace

import click

from herder.checkpoint.source import ModelSource
from herder.config.load import override_architecture

architecture_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Replace one field of the model's architecture, for example "
    "--set moe.num_experts_per_token=4. May be repeated.",
)
"""To be given to `overridden`."""


def overridden(source: ModelSource, overrides: tuple[str, ...]) -> ModelSource:
    """The model with fields of its architecture replaced. Raises ConfigError."""
    architecture = override_architecture(source.architecture, overrides, where=source.name)
    return replace(source, architecture=architecture)
