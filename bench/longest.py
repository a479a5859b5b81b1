"""The longest sequence that trains in 1 GB a rank, when 1, 2 and 4 ranks share it.

What counts is the memory that a rank uses at the worst moment of an optimizer step, beyond what the
process had before it built the model: parameters, gradients, optimizer state, activations, scratch
of kernels and buffers of gloo. The text of libraries does not count, nor what an allocator would
keep for later. The length told was trained on, and so was the next one, which took more than 1 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import cases
import scaling
from memory import forget_peak, return_what_is_freed, status_bytes
from rich.console import Console
from rich.table import Table

from herder.parallel.ranks import run_on_ranks

LIMIT_BYTES = 10**9
STEP_TOKENS = 128
"""Of a rank: lengths are multiples of this times the ranks."""
MODEL = {
    **cases.DENSE,
    "vocab_size": 1_024,
    "hidden_size": 256,
    "intermediate_size": 1_024,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2**20,
    "tie_word_embeddings": True,
}
"""11.3 M parameters, whose state is a sixth of the limit for one rank; more ranks share out the
optimizer's (ZeRO-1). Nothing is computed twice, since attention over the lengths that this would
reach takes minutes a step on few cores."""


def compare(console: Console, precision: str, arguments: argparse.Namespace) -> list[dict]:
    """A row for each number of ranks."""
    del arguments
    table = Table(title=f"longest {precision}: sequence trained in 1 GB a rank")
    for heading in ("ranks", "tokens", "of one rank's", "peak GB", "of the next length"):
        table.add_column(heading, justify="right")
    rows = []
    for num_ranks in (1, 2, 4):
        measure = partial(measured_bytes, console, precision, num_ranks)
        tokens, peak, next_peak = search(measure, STEP_TOKENS * num_ranks)
        first = rows[0]["tokens"] if rows else tokens
        rows.append(
            {
                "work": "longest",
                "precision": precision,
                "setting": f"cp {num_ranks}",
                "tokens": tokens,
                "ratio_to_one_rank": tokens / first,
                "peak_gb": peak / 1e9,
                "peak_gb_of_next_length": next_peak / 1e9,
            }
        )
        _, _, _, *numbers = rows[-1].values()
        told = (f"{numbers[0]:,}", *(f"{number:.2f}" for number in numbers[1:]))
        table.add_row(str(num_ranks), *told)
    console.print(table, "peak GB: of the rank with most")
    return rows


def search(measure: Callable[[int], int], step: int) -> tuple[int, int, int]:
    """(the last length before one that exceeds the limit, its peak, the next one's peak).

    Memory is all but linear in the length, so the next one to try is where the line through the two
    longest would meet the limit.
    """
    peaks = {length: measure(length) for length in (8 * step, 16 * step)}
    while True:
        exceeding = min((n for n, peak in peaks.items() if peak > LIMIT_BYTES), default=None)
        fitting = max((n for n in peaks if exceeding is None or n < exceeding), default=0)
        if exceeding == fitting + step:
            return fitting, peaks[fitting], peaks[exceeding]
        (short, less), (long, most) = sorted(peaks.items())[-2:]
        slope = max(most - less, 1) / (long - short)
        guess = long + (LIMIT_BYTES - most) / slope
        length = max(fitting + step, min(int(guess) // step * step, 4 * long))
        if exceeding is not None:
            length = min(length, exceeding - step)
        peaks[length] = measure(length)


def measured_bytes(console: Console, precision: str, num_ranks: int, num_tokens: int) -> int:
    """Of the rank with most."""
    threads = 2 if num_ranks == 1 else 1
    limits = {"timeout_seconds": 600.0, "num_threads": threads}
    told = run_on_ranks(peak_of_step, num_ranks, precision, num_ranks, num_tokens, **limits)
    console.print(
        f"longest {precision}, cp {num_ranks}: {num_tokens:,} tokens, {max(told) / 1e9:.2f} GB"
    )
    return max(told)


def peak_of_step(precision: str, num_ranks: int, num_tokens: int) -> int:
    """Of a step that is not the first: the state of the optimizer is there."""
    return_what_is_freed()
    before = status_bytes("VmRSS") - status_bytes("RssFile")
    cases.MICRO_BATCH_SIZE, cases.SEQUENCE_LENGTH = 1, num_tokens
    layout = {"context_parallel_size": num_ranks}
    step = scaling.trainer(MODEL, scaling.Setting(num_ranks, layout), precision)
    cases.SEQUENCE_LENGTH = 64 * num_ranks
    step(cases.micro_batches(MODEL["vocab_size"])[:1])
    cases.SEQUENCE_LENGTH = num_tokens
    batches = cases.micro_batches(MODEL["vocab_size"])[:1]
    forget_peak()
    step(batches)
    return status_bytes("VmHWM") - status_bytes("RssFile") - before
