"""The flags of `herder serve`: the fields of ServeConfig, and what is no recipe's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from herder.config.run import ServeConfig
from herder.serve.app import MAX_BODY_BYTES
from herder.serve.load import DTYPES

_DEFAULTS = ServeConfig()


def serve_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """All of them, in the order of --help."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = (
    click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen at."),
    click.option(
        "--port",
        type=click.IntRange(0, 65_535),
        default=_DEFAULTS.port,
        show_default=True,
        help="0: any free port, printed.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=1),
        help="Longest prompt plus answer, in tokens.  [default: the model's window]",
    ),
    click.option(
        "--precision",
        type=click.Choice(["auto", *DTYPES]),
        default=_DEFAULTS.precision,
        show_default=True,
        help="Of weights, activations and cache. auto: bf16, but fp32 on GPUs without it.",
    ),
    click.option(
        "--max-queued-requests",
        type=click.IntRange(min=1),
        default=_DEFAULTS.max_queued_requests,
        show_default=True,
        help="Further requests get status 429.",
    ),
    click.option(
        "--max-body-bytes",
        type=click.IntRange(min=1),
        default=MAX_BODY_BYTES,
        show_default=True,
        help="Larger requests get status 413.",
    ),
    click.option(
        "--api-key",
        envvar="HERDER_API_KEY",
        show_envvar=True,
        help="Asked of every client, but for probes. The variable stays out of lists of processes.",
    ),
)
