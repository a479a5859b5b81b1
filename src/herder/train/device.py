"""Where a run computes and how fast that place can multiply matrices.

Owns the choice of the device, its memory reading and the measured peak of a CPU. Knows no model.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from herder.config.run import GpuConfig
from herder.observe.meters import peak_process_bytes

Precision = Literal["fp32", "bf16"]
PEAK_FILE = "peak_flops.json"
_GEMM_SIZE = 1024
_GEMM_SECONDS = 0.4


def choose_device(local_index: int = 0) -> torch.device:
    """The GPU of that number where there are any, else the CPU.

    Slurm may show each of a node's processes its own GPU alone, which then is the only one.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def describe_device(device: torch.device) -> str:
    """The device in a few words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {_threads()}"


def peak_memory_bytes(device: torch.device) -> int:
    """Highest so far: allocated on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_process_bytes()


def num_devices(device: torch.device) -> int:
    """How many GPUs one process may drive; 1 on a CPU."""
    return torch.cuda.device_count() if device.type == "cuda" else 1


def peak_memory_of_each(device: torch.device) -> tuple[int, ...]:
    """Bytes, the highest so far, on each device that one process may drive."""
    if device.type == "cuda":
        return tuple(map(torch.cuda.max_memory_allocated, range(num_devices(device))))
    return (peak_memory_bytes(device),)


def peak_flops_per_second(
    device: torch.device, gpu: GpuConfig, *, precision: Precision, run_directory: Path
) -> tuple[float, str]:
    """(dense peak, where it is from): the catalog's for a GPU, measured here for a CPU.

    The measurement is kept in the run directory, by precision and number of threads, so that a
    resumed run is held against the same peak.
    """
    if device.type == "cuda":
        catalog = gpu.bf16_tflops if precision == "bf16" else gpu.fp32_tflops
        return (catalog or gpu.bf16_tflops) * 1e12, gpu.name
    path = run_directory / PEAK_FILE
    key = f"{precision}, {_threads()}"
    known = dict[str, float]()
    with suppress(OSError, ValueError, TypeError):
        known.update(json.loads(path.read_text(encoding="utf-8")))
    if key not in known:
        known[key] = measure_gemm_flops_per_second(precision)
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return known[key], f"measured by a {_GEMM_SIZE} x {_GEMM_SIZE} product, {key}"


def _threads() -> str:
    num_threads = torch.get_num_threads()
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


def measure_gemm_flops_per_second(precision: Precision) -> float:
    """The best rate of a square matrix product on this CPU within a fraction of a second.

    bf16: the better of bf16 and fp32, for a processor without bf16 arithmetic multiplies in fp32.
    """
    dtypes = [torch.float32, torch.bfloat16] if precision == "bf16" else [torch.float32]
    return max(_gemm_flops_per_second(dtype) for dtype in dtypes)


def _gemm_flops_per_second(dtype: torch.dtype) -> float:
    shape = (_GEMM_SIZE, _GEMM_SIZE)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(shape, dtype=dtype)
    best_seconds, until = float("inf"), time.perf_counter() + _GEMM_SECONDS
    while (start := time.perf_counter()) < until:
        torch.mm(a, b, out=out)
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2 * _GEMM_SIZE**3 / best_seconds
