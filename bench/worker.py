"""One side of one comparison in a process of its own, so that its peak memory is its own.

Answers with JSON, {"tokens", "seconds"}: first of its last warm-up, then of a repetition for each
line from stdin; at the end of input {"peak_gb"}. Between repetitions it waits, so two workers can
take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import cases
import torch
from memory import peak_bytes


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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sequences", type=int, default=cases.MICRO_BATCH_SIZE)
    parser.add_argument("--warmup", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases.MICRO_BATCH_SIZE = arguments.sequences
    case = cases.build(
        arguments.side,
        arguments.work,
        arguments.precision,
        arguments.mode,
        arguments.model,
        arguments.device,
    )
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None

    def timed() -> dict[str, float]:
        wait()
        start = time.perf_counter()
        tokens = case()
        wait()
        return {"tokens": tokens, "seconds": time.perf_counter() - start}

    for _ in range(arguments.warmup - 1):
        case()
    answer(timed())
    for _ in sys.stdin:
        answer(timed())
    answer({"peak_gb": peak_bytes(arguments.device) / 1e9})


def answer(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
