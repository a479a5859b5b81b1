"""`--quantization` on commands that load a model or plan to. Composition only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from herder.config.quantization import DEFAULT_GROUP_SIZE, GROUP_SIZES, QUANTIZATIONS


def quantization_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--quantization and --quantization-group-size, to be given to `weight_quantization`."""
    size = click.option(
        "--quantization-group-size",
        type=click.Choice(GROUP_SIZES),
        callback=_of_something,
        help=f"Inputs of a row that share a scale.  [default: {DEFAULT_GROUP_SIZE}]",
    )
    kind = click.option(
        "--quantization",
        type=click.Choice(list(QUANTIZATIONS)),
        is_eager=True,
        help="Keep the layers' matrices in 8 or 4 bits, rounded as they are loaded; embedding, "
        "head, norms and routers stay wide.  [default: as wide as all else]",
    )
    return kind(size(function))


def _of_something(ctx: click.Context, param: click.Parameter, group_size: int | None) -> int | None:
    if group_size is not None and ctx.params.get("quantization") is None:
        raise click.BadParameter(
            f"{group_size} inputs of what? Groups are of quantized weights: give --quantization "
            f"{' or '.join(QUANTIZATIONS)} too.",
            ctx=ctx,
            param=param,
        )
    return group_size
