"""One side of one comparison in a process of its own, so that its peak memory is its own.

Reads a line from stdin for each repetition and answers with JSON: {"tokens", "seconds"}; at the end
of input {"peak_gb"}. Between repetitions it waits, so two workers can take turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import cases
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["herder", "transformers"])
    parser.add_argument("work", choices=[*cases.TRAINED, *cases.MANY_EXPERTS, "decode", "prefill"])
    parser.add_argument("--precision", choices=["fp32", "bf16"], required=True)
    parser.add_argument(
        "--mode", choices=["eager", "compile", *cases.EXPERT_COUNTS], default="eager"
    )
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--warmup", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    case = cases.build(
        arguments.side, arguments.work, arguments.precision, arguments.mode, arguments.model
    )
    for _ in range(arguments.warmup):
        case()
    answer({"ready": True})
    for _ in sys.stdin:
        start = time.perf_counter()
        tokens = case()
        answer({"tokens": tokens, "seconds": time.perf_counter() - start})
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer({"peak_gb": peak_kib * 1024 / 1e9})


def answer(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
