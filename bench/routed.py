"""One routed layer over two ranks: the memory that dispatch takes at its worst moment, and how much
of the exchange of rows is hidden behind the shared expert.

Measured through the layer's modules alone, whatever dispatch does inside.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from cases import DTYPES
from memory import forget_peak, return_what_is_freed, status_bytes
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from herder.config.architecture import MoeConfig
from herder.model.experts import Moe
from herder.parallel.expert import apply_expert_parallel
from herder.parallel.ranks import run_on_ranks

NUM_TOKENS = 8_192
"""Of each rank."""
HIDDEN_SIZE = 1_024
NUM_EXPERTS = 16
EXPERT_WIDTH = 512
NUM_CHOSEN = 2
NUM_RANKS = 2
SHARED_WIDTHS = (EXPERT_WIDTH, 2 * EXPERT_WIDTH)
"""As DeepSeek-V3's one and DeepSeek-V2's two shared experts."""
PASSES = ("forward without gradients", "forward", "forward and backward")
TIMED_REPEATS = 4
"""Times as many repetitions as of a training step: what is sought is a difference."""


def compare_memory(console: Console, precision: str, arguments: argparse.Namespace) -> list[dict]:
    """Worst moments without expert parallelism and with it; a row each."""
    del arguments
    rows_bytes = NUM_TOKENS * NUM_CHOSEN * HIDDEN_SIZE * DTYPES[precision].itemsize
    table = Table(
        title=f"dispatch {precision}: most memory beyond what was there before, in times of the "
        f"rows' {rows_bytes / 1e6:.0f} MB",
        title_justify="left",
    )
    for heading in ("setting", *PASSES):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    rows = []
    for name, num_ranks in (("one process", 1), (f"experts over {NUM_RANKS} ranks", NUM_RANKS)):
        console.print(f"dispatch {precision}: {name}")
        of_ranks = run_on_ranks(peaks, num_ranks, precision, timeout_seconds=600.0)
        most = [max(told) for told in zip(*of_ranks, strict=True)]
        multiples = {key: peak / rows_bytes for key, peak in zip(PASSES, most, strict=True)}
        rows.append(
            {
                "work": "dispatch",
                "precision": precision,
                "setting": name,
                "rows_bytes": rows_bytes,
                "peak_of_rows_bytes": multiples,
            }
        )
        table.add_row(name, *(f"{multiple:.2f}" for multiple in multiples.values()))
    console.print(table, "of the rank with most; gradients of weights were there before")
    return rows


def peaks(precision: str) -> list[int]:
    """Bytes beyond what was there before, at the worst moment of each of the passes."""
    return_what_is_freed()
    layer, x_TD = build_layer(precision), tokens(precision)
    grad_TD = torch.randn_like(x_TD)

    def forward_without_gradients() -> object:
        with torch.no_grad():
            return layer(x_TD)

    def forward() -> object:
        return layer(x_TD)

    def forward_and_backward() -> None:
        layer(x_TD).backward(grad_TD)

    passes = (forward_without_gradients, forward, forward_and_backward)
    for each in passes:  # libraries, and the gradients that later ones are added to
        each()
    return [peak_growth(each) for each in passes]


def peak_growth(work: Callable[[], object]) -> int:
    gc.collect()
    dist.barrier()
    forget_peak()
    before = status_bytes("VmRSS")
    kept = work()
    growth = status_bytes("VmHWM") - before
    del kept
    return growth


def compare_overlap(console: Console, precision: str, arguments: argparse.Namespace) -> list[dict]:
    """Forward of the layer with and without shared experts; a row for each width of those.

    The exchange is what the layer without shared expert takes beyond a layer of one rank's experts
    that are given as many rows. What is hidden is what exchange, products and shared expert take
    one after the other beyond what they take in one layer.
    """
    repeats = TIMED_REPEATS * arguments.repeats
    console.print(f"overlap {precision}: {repeats} repetitions")
    seconds = run_on_ranks(seconds_of_parts, NUM_RANKS, precision, repeats, timeout_seconds=600.0)[
        0
    ]
    routed, local = seconds["routed"], seconds["local"]
    exchange = [a - b for a, b in zip(routed, local, strict=True)]
    table = Table(
        title=f"overlap {precision}: forward of a routed layer, {NUM_RANKS} ranks x 1 thread",
        title_justify="left",
    )
    headings = ("setting", "runs", "layer ms", "exchange ms", "products ms", "shared ms", "hidden")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    rows = []
    for width in SHARED_WIDTHS:
        whole, shared = seconds[f"whole {width}"], seconds[f"shared {width}"]
        hidden = [a + b - c for a, b, c in zip(routed, shared, whole, strict=True)]
        share = hidden_share(exchange, shared, hidden)
        medians = [statistics.median(each) for each in (whole, exchange, local, shared)]
        name = f"shared width {width}"
        keys = ("layer_seconds", "exchange_seconds", "products_seconds", "shared_seconds")
        rows.append(
            {
                "work": "overlap",
                "precision": precision,
                "setting": name,
                "repetitions": repeats,
                **dict(zip(keys, medians, strict=True)),
                "hidden_share": share,
            }
        )
        told = "n/a" if share is None else f"{share:.0%}"
        table.add_row(name, str(repeats), *(f"{1e3 * each:.0f}" for each in medians), told)
    console.print(table, "hidden: of the shorter of exchange and shared expert; n/a: lost in noise")
    return rows


def hidden_share(
    exchange: Sequence[float], shared: Sequence[float], hidden: Sequence[float]
) -> float | None:
    """Of what could be hidden, by medians; None where quartiles are wider apart than that."""
    could_be = min(statistics.median(exchange), statistics.median(shared))
    for seconds in (exchange, hidden):
        first, _, third = statistics.quantiles(seconds, n=4)
        if third - first > could_be:
            return None
    return statistics.median(hidden) / could_be


def seconds_of_parts(precision: str, repeats: int) -> dict[str, list[float]]:
    """Of the slowest rank, repetition by repetition in turns."""
    x_TD = tokens(precision)
    parts: dict[str, Callable[[torch.Tensor], object]] = {
        "routed": build_layer(precision),
        "local": build_layer(precision, num_experts=NUM_EXPERTS // NUM_RANKS, is_local=True),
    }
    for width in SHARED_WIDTHS:
        layer = build_layer(precision, shared_width=width)
        assert layer.shared is not None, "asked for"
        parts |= {f"whole {width}": layer, f"shared {width}": layer.shared}
    seconds = torch.zeros(repeats + 1, len(parts), dtype=torch.float64)
    for row in seconds:
        for index, part in enumerate(parts.values()):
            dist.barrier()
            start = time.perf_counter()
            part(x_TD)
            row[index] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(parts, seconds[1:].T.tolist(), strict=True))  # the first one warms up


def build_layer(
    precision: str,
    *,
    num_experts: int = NUM_EXPERTS,
    shared_width: int | None = None,
    is_local: bool = False,
) -> Moe:
    """A layer of random weights, the same on all ranks, of which each has its experts."""
    config = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=NUM_CHOSEN,
        expert_intermediate_size=EXPERT_WIDTH,
        shared_expert_intermediate_size=shared_width,
        scoring="softmax",
        normalize_weights=True,
    )
    torch.manual_seed(0)
    layer = Moe(HIDDEN_SIZE, config, device="cpu", dtype=DTYPES[precision])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if dist.get_world_size() > 1 and not is_local:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        apply_expert_parallel(layer, mesh)
    return layer


def tokens(precision: str) -> torch.Tensor:
    """This rank's x_TD, of which gradients are wanted."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(DTYPES[precision])
    return x_TD.requires_grad_()
