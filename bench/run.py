"""herder beside transformers on the same work, weights, tokens and threads; and beside itself with
more and more experts, of which a token meets two; and on two ranks beside one process.

Each comparison runs all its settings in processes of their own that take turns, repetition by
repetition, so that a machine that slows down slows all of them. Prints medians, ratios of paired
repetitions against the peer's fastest setting, and the share of what the machine can do at most.

Of ranks it also tells the memory that dispatch to experts takes, the share of their exchange that
is hidden behind a shared expert, and the longest sequence that trains in a given memory; of
checkpoints how long a run stands still for one, beside `dcp.save` and the disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cases
import longest
import roofline
import routed
import saving
import scaling
import torch
from rich.console import Console
from rich.table import Table
from workers import Worker, take_turns

from herder.model.linear import multiplies_bf16

HERE = Path(__file__).parent
FLOPS_PER_TOKEN = {
    "train": 252.4e6,
    "train-moe": 75.9e6,
    "experts": 75.9e6,
    "experts-forward": 75.9e6 / 3,
}
"""Models D and M, forward and backward (thrice a forward): 6 x 40.0 M and 6 x 12.1 M matrix
parameters that a token meets, and causal attention at 512."""
SEQUENCES_OF_MANY_EXPERTS = 4
"""Times as many: 8,192 tokens, as a GPU's micro-batch has. Backward writes the gradient of all
experts, 0.4 GB of it at 64, however few the tokens are."""
AIMS = {
    ("train", "fp32"): (1.1, 0.6),
    ("train", "bf16"): (1.2, 0.6),
    ("train-moe", "fp32"): (1.15, None),
    ("train-moe", "bf16"): (1.3, None),
    ("decode", "fp32"): (1.5, None),
    ("decode", "bf16"): (1.5, None),
    ("prefill", "fp32"): (1.2, None),
    ("prefill", "bf16"): (1.2, None),
}
"""(speed against the peer's best setting, peak memory against that setting's)."""


ON_RANKS = {
    **{work: partial(scaling.compare, work) for work in scaling.COMPARISONS},
    "dispatch": routed.compare_memory,
    "overlap": routed.compare_overlap,
    "longest": longest.compare,
    "saving": saving.compare,
}
WORKS = ("decode", "prefill", *cases.MANY_EXPERTS, "train-moe", "train", *ON_RANKS)


def main() -> None:
    arguments = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)  # a log keeps whole words
    device = arguments.device
    limits = {
        "fp32 GEMM GFLOP/s": roofline.gemm_gflops(torch.float32, device=device),
        "bf16 GEMM GFLOP/s": roofline.gemm_gflops(torch.bfloat16, device=device),
        "memory read GB/s": roofline.read_gb_per_second(device=device),
    }
    name = f"{arguments.threads} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    console.print(f"{name}, torch {torch.__version__}:", limits)
    model = None
    if {"decode", "prefill"} & set(arguments.works):
        model = converted_model()
    results = []
    for work in arguments.works:
        for precision in arguments.precisions:
            if work in ON_RANKS:
                if precision == "bf16" and not multiplies_bf16():
                    told = "left out, this processor would emulate the products"
                    console.print(f"{work} {precision}: {told}")
                    continue
                results += ON_RANKS[work](console, precision, arguments)
                continue
            workers = compare(console, work, precision, model, arguments)
            aims = AIMS.get((work, precision)) if device == "cpu" else None
            results += report(console, work, precision, workers, limits, aims)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        told = {"machine": name, "limits": limits, "rows": results}
        arguments.output.write_text(json.dumps(told, indent=1))
        console.print(f"rows: {arguments.output}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    sides = ["herder", "transformers"]
    parser.add_argument("--sides", nargs="+", default=sides, choices=sides)
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], help="of training")
    parser.add_argument("--repeats", type=int, default=5, help="of each setting, in turns")
    parser.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="of one setting's repetitions; a warm-up that takes as long is the only one",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--sequences", type=int, default=cases.MICRO_BATCH_SIZE, help="of a training step"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench/results.json"))
    return parser.parse_args()


def converted_model() -> Path:
    """SmolLM2-135M-Instruct as a folder both sides load."""
    folder = Path("runs/bench/smollm2-135m-instruct").resolve()
    if not folder.exists():
        herder = [sys.executable, "-c", "from herder.cli.main import main; main()"]
        subprocess.run([*herder, "convert", "smollm2-135m-instruct", folder], check=True)
    return folder


def compare(
    console: Console,
    work: str,
    precision: str,
    model: Path | None,
    arguments: argparse.Namespace,
) -> list[Worker]:
    command = [sys.executable, str(HERE / "worker.py")]
    sequences = arguments.sequences
    if work in FLOPS_PER_TOKEN:  # as `herder train` starts itself; the peer gets it too
        command = ["env", "THP_MEM_ALLOC_ENABLE=1", *command]
    if work in cases.MANY_EXPERTS:
        sequences *= SEQUENCES_OF_MANY_EXPERTS
    options = ["--precision", precision, "--threads", str(arguments.threads)]
    options += ["--device", arguments.device, "--sequences", str(sequences)]
    if model is not None:
        options += ["--model", str(model)]
    settings = [
        (side, mode, [*command, side, work, "--mode", mode, *options])
        for side, mode in settings_of(work, arguments)
    ]
    return take_turns(
        console,
        f"{work} {precision}",
        settings,
        repeats=arguments.repeats,
        limit_seconds=arguments.limit,
    )


def settings_of(work: str, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(side, mode) of the settings that take turns."""
    if work in cases.MANY_EXPERTS:
        yield from (("herder", count) for count in cases.EXPERT_COUNTS)
        return
    modes = arguments.modes if work in cases.TRAINED else ["eager"]
    for side in arguments.sides:
        yield from ((side, mode) for mode in modes)


def report(
    console: Console,
    work: str,
    precision: str,
    workers: list[Worker],
    limits: dict[str, float],
    aims: tuple[float, float | None] | None,
) -> list[dict]:
    peers = [worker for worker in workers if worker.side != "herder"]
    peer = max(peers, key=lambda worker: worker.tokens_per_second) if peers else workers[0]
    speed_aim, memory_aim = aims or (None, None)
    title = f"{work} {precision}: ratios against {peer.name}"
    if speed_aim:
        title += f"; aim {speed_aim} x"
    if memory_aim:
        title += f" at {memory_aim:.0%} of its memory"
    table = Table(title=title, title_justify="left")
    for heading in (
        "setting",
        "runs",
        "tokens/s",
        "min",
        "max",
        "ratio",
        "peak GB",
        "memory",
        "of limit",
    ):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    rows = []
    for worker in workers:
        ratio = worker.ratio_to(peer)
        share, limit = share_of_limit(work, precision, worker.tokens_per_second, limits)
        rows.append(
            {
                "work": work,
                "precision": precision,
                "setting": worker.name,
                "repetitions": len(worker.rates),
                "tokens_per_second": worker.tokens_per_second,
                "ratio": ratio,
                "peak_gb": worker.peak_gb,
                "memory_ratio": worker.peak_gb / peer.peak_gb,
                "share_of_limit": share,
                "limit": limit,
            }
        )
        table.add_row(
            worker.name,
            str(len(worker.rates)),
            f"{worker.tokens_per_second:.1f}",
            f"{min(worker.rates):.1f}",
            f"{max(worker.rates):.1f}",
            f"{ratio:.2f}",
            f"{worker.peak_gb:.2f}",
            f"{worker.peak_gb / peer.peak_gb:.0%}",
            f"{share:.0%} {limit}",
        )
    console.print(table)
    return rows


def share_of_limit(
    work: str, precision: str, tokens_per_second: float, limits: dict[str, float]
) -> tuple[float, str]:
    """Training and prefill are bound by products, decoding by reading the weights once a token."""
    gemm_gflops = limits["fp32 GEMM GFLOP/s"]
    if precision == "bf16":  # whose products may be taken in fp32 where that is faster
        gemm_gflops = max(gemm_gflops, limits["bf16 GEMM GFLOP/s"])
    if work in FLOPS_PER_TOKEN:
        return tokens_per_second * FLOPS_PER_TOKEN[work] / 1e9 / gemm_gflops, "GEMM"
    num_parameters = 134_515_008
    if work == "prefill":
        num_matrix_parameters = num_parameters - 49_152 * 576
        return tokens_per_second * 2 * num_matrix_parameters / 1e9 / gemm_gflops, "GEMM"
    bytes_per_token = num_parameters * (4 if precision == "fp32" else 2)
    return tokens_per_second * bytes_per_token / 1e9 / limits["memory read GB/s"], "memory"


if __name__ == "__main__":
    main()
