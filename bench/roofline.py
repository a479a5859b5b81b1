"""What this machine can do at most, measured now: matrix products a second, bytes a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def gemm_gflops(dtype: torch.dtype, *, device: str = "cpu", repeats: int = 5) -> float:
    """GFLOP/s of a square product large enough to be bound by arithmetic."""
    size = 2_048 if dtype == torch.float32 else 1_024
    if device == "cuda":
        size = 8_192
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / _median_seconds(lambda: left @ right, repeats) / 1e9


def read_gb_per_second(*, device: str = "cpu", repeats: int = 5) -> float:
    """GB/s (1e9) of reading fp32 numbers that no cache holds."""
    numbers = torch.ones(128 * 2**20 if device == "cpu" else 2**30, device=device)
    return numbers.nbytes / _median_seconds(numbers.sum, repeats) / 1e9


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    work()
    seconds = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
