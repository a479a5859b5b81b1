"""The flags of `herder loadtest`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from herder.cli.plan_options import COUNT, FiniteRange, cluster_options

_RATE = FiniteRange(min=0, min_open=True)


class Several(click.ParamType[tuple[Any, ...], Any]):
    """Values of one kind, joined by commas."""

    def __init__(self, kind: click.ParamType[Any, Any]) -> None:
        self._kind, self.name = kind, f"{kind.name},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """The values; a usage error where one is not of the kind."""
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(self._kind.convert(part, param, ctx) for part in parts)


def loadtest_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """All of them; those of the plan and of the server as the mappings `cluster` and `target`."""

    @wraps(function)
    def grouped(**given: Any) -> Any:
        cluster = {name: given.pop(name) for name in ("nodes", "gpus_per_node", "gpu_name")}
        target = {name: given.pop(name) for name in ("model", "api_key", "server_pid")}
        return function(cluster=cluster, target=target, **given)

    for option in reversed(_OPTIONS):
        grouped = option(grouped)
    return cluster_options(grouped)


_OPTIONS = (
    click.option(
        "--concurrency",
        type=Several(COUNT),
        default="1,2,4,8",
        show_default=True,
        help="Requests at once, a load each.",
    ),
    click.option(
        "--rate", type=Several(_RATE), default=(), help="Requests a second instead, a load each."
    ),
    click.option("--requests", type=COUNT, default=32, show_default=True, help="Of each load."),
    click.option(
        "--prompt-tokens",
        type=Several(COUNT),
        default="128",
        show_default=True,
        help="Mixed lengths.",
    ),
    click.option(
        "--shared-prefix-tokens",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="With which all prompts begin.",
    ),
    click.option("--output-tokens", type=COUNT, default=64, show_default=True, help="At most."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals."),
    click.option("--chat", "as_chat", is_flag=True, help="Ask /v1/chat/completions."),
    click.option("--model", help="Whom to ask.  [default: the first that is listed]"),
    click.option("--api-key", envvar="HERDER_API_KEY", show_envvar=True, help="Of the server."),
    click.option("--server-pid", type=COUNT, help="A process here, whose memory is watched."),
    click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="An SVG file."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
