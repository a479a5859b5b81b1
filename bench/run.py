"""herder beside transformers on the same work, weights, tokens and threads; and beside itself with
more and more experts, of which a token meets two.

Each comparison runs all its settings in processes of their own that take turns, repetition by
repetition, so that a machine that slows down slows all of them. Prints medians, ratios of paired
repetitions against the peer's fastest setting, and the share of what the machine can do at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cases
import roofline
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
FLOPS_PER_TOKEN = {
    "train": 252.4e6,
    "train-moe": 75.9e6,
    "experts": 75.9e6,
    "experts-forward": 75.9e6 / 3,
}
"""Models D and M, forward and backward (thrice a forward): 6 x 40.0 M and 6 x 12.1 M matrix
parameters that a token meets, and causal attention at 512."""
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


WORKS = ("decode", "prefill", *cases.MANY_EXPERTS, "train-moe", "train")


@dataclass
class Worker:
    """One setting: side and mode, its process and its measurements."""

    side: str
    mode: str
    process: subprocess.Popen
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_gb: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.side} {self.mode}" + (" experts" if self.mode.isdigit() else "")

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.rates)

    def has_time(self, limit_seconds: float) -> bool:
        """Whether one more repetition, as long as the last, ends within the limit."""
        return not self.seconds or sum(self.seconds) + self.seconds[-1] <= limit_seconds

    def repeat(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        reply = self.read()
        self.rates.append(reply["tokens"] / reply["seconds"])
        self.seconds.append(reply["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.peak_gb = self.read()["peak_gb"]
        self.process.wait()

    def read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: {self.name} died with exit status {self.process.wait()}")
        return json.loads(line)


def main() -> None:
    arguments = parse()
    console = Console()
    limits = {
        "fp32 GEMM GFLOP/s": roofline.gemm_gflops(torch.float32),
        "bf16 GEMM GFLOP/s": roofline.gemm_gflops(torch.bfloat16),
        "memory read GB/s": roofline.read_gb_per_second(),
    }
    console.print(f"{arguments.threads} threads, torch {torch.__version__}:", limits)
    model = None
    if {"decode", "prefill"} & set(arguments.works):
        model = converted_model()
    results = []
    for work in arguments.works:
        for precision in arguments.precisions:
            workers = compare(work, precision, model, arguments)
            results += report(console, work, precision, workers, limits)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"limits": limits, "rows": results}, indent=1))
        console.print(f"rows: {arguments.output}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], help="of training")
    parser.add_argument("--repeats", type=int, default=5, help="of each setting, in turns")
    parser.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="of repetitions of one setting: the first is always done, a further one if it fits",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/bench/results.json"))
    return parser.parse_args()


def converted_model() -> Path:
    """SmolLM2-135M-Instruct as a folder both sides load."""
    folder = Path("runs/bench/smollm2-135m-instruct").resolve()
    if not folder.exists():
        herder = Path(sys.executable).with_name("herder")
        subprocess.run([herder, "convert", "smollm2-135m-instruct", folder], check=True)
    return folder


def compare(
    work: str, precision: str, model: Path | None, arguments: argparse.Namespace
) -> list[Worker]:
    workers, settings = [], list(settings_of(work, arguments.modes))
    with Progress(transient=True) as progress:
        task = progress.add_task(f"{work} {precision}", total=len(settings) * arguments.repeats)
        for side, mode in settings:
            progress.update(task, description=f"{work} {precision}: starting {side} {mode}")
            workers.append(start(side, work, precision, mode, model, arguments.threads))
        for _ in range(arguments.repeats):
            for worker in workers:
                progress.update(task, description=f"{work} {precision}: {worker.name}")
                if worker.has_time(arguments.limit):
                    worker.repeat()
                progress.advance(task)
    for worker in workers:
        worker.close()
    return workers


def settings_of(work: str, modes: list[str]) -> Iterator[tuple[str, str]]:
    """(side, mode) of the settings that take turns."""
    if work in cases.MANY_EXPERTS:
        yield from (("herder", count) for count in cases.EXPERT_COUNTS)
        return
    for side in ("herder", "transformers"):
        yield from ((side, mode) for mode in (modes if work in cases.TRAINED else ["eager"]))


def start(
    side: str, work: str, precision: str, mode: str, model: Path | None, threads: int
) -> Worker:
    command = [sys.executable, str(HERE / "worker.py"), side, work]
    command += ["--precision", precision, "--mode", mode, "--threads", str(threads)]
    if model is not None:
        command += ["--model", str(model)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = Worker(side, mode, process)
    worker.read()
    return worker


def report(
    console: Console, work: str, precision: str, workers: list[Worker], limits: dict[str, float]
) -> list[dict]:
    peers = [worker for worker in workers if worker.side != "herder"]
    peer = max(peers, key=lambda worker: worker.tokens_per_second) if peers else workers[0]
    speed_aim, memory_aim = AIMS.get((work, precision), (None, None))
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
        ratio = statistics.median(
            # a slow setting has fewer repetitions: its own are paired with the first of the others
            ours / theirs
            for ours, theirs in zip(worker.rates, peer.rates, strict=False)
        )
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
