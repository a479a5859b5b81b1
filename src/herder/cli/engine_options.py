"""The options of a command that serves: how many requests at once, and from how much memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import click

from herder.config.run import EngineConfig

_DEFAULTS = EngineConfig()
_OPTIONS = (
    click.option(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        default=_DEFAULTS.max_num_seqs,
        show_default=True,
        help="Requests answered at once.",
    ),
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(min=1),
        help="Tokens of one forward: those of answers, then chunks of prompts.  "
        "[default: 512 on a CPU, 4096 on a GPU]",
    ),
    click.option(
        "--block-size",
        type=click.IntRange(1, 1024),
        default=_DEFAULTS.block_size,
        show_default=True,
        help="Tokens of a block of the key-value cache.",
    ),
    click.option(
        "--prefix-caching/--no-prefix-caching",
        default=_DEFAULTS.prefix_caching,
        show_default=True,
        help="Keep keys and values of a text for requests that begin with the same one.",
    ),
    click.option(
        "--kv-cache-gb",
        type=click.FloatRange(min=0, min_open=True),
        help="Size of the key-value cache.  [default: on a CPU a quarter of the free memory, at "
        "most 4; on a GPU what 85 % of its memory leave]",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the fields of EngineConfig."""
    return reduce(lambda made, option: option(made), reversed(_OPTIONS), command)
