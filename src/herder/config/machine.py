"""What this machine is as a CPU, the share of it that each of several ranks gets, and nvidia-smi.

Owns the reading of the system's and the driver's figures and the peaks that follow from the first.
Imports no torch: planning must start at once.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

from pydantic import JsonValue

from herder.config.run import GpuConfig
from herder.units import GB, GIB

ASSUMED_CPU_MHZ = 2500.0
CPU_MEMORY_BANDWIDTH_GB_PER_SECOND_PER_CORE = 16.0
"""Measured on two EPYC 9004 cores: 31.5 to 33 GB/s of reads."""
FP32_FLOPS_PER_CYCLE = (("avx512f", 64.0), ("avx2", 32.0), ("asimd", 16.0))
"""Two fused multiply-adds of one vector a cycle; the first instruction set present counts.
Source: Intel 64 and IA-32 Optimization Reference Manual, chapter 2; Arm Neoverse V1 guide."""
BF16_SPEEDUP = (("amx_bf16", 16.0), ("avx512_bf16", 2.0), ("bf16", 2.0))
"""bf16 over fp32 rate. Without one of these bf16 is emulated and no faster than fp32."""


@cache
def cpu_share(num_ranks: int) -> GpuConfig:
    """What each of `num_ranks` ranks gets that share this machine's cores and memory evenly.

    Read once a process: a clock that changes must not change a plan.
    """
    cpu_info = _read(Path("/proc/cpuinfo"))
    features = re.search(r"(?m)^(?:flags|Features)\s*:\s*(.*)$", cpu_info)
    clock = re.search(r"(?m)^cpu MHz\s*:\s*([0-9.]+)", cpu_info)
    return cpu_device(
        num_cores=usable_cores() / num_ranks,
        memory_bytes=usable_memory_bytes() / num_ranks,
        mhz=float(clock.group(1)) if clock else ASSUMED_CPU_MHZ,
        features=frozenset(features.group(1).split()) if features else frozenset(),
    )


def cpu_device(
    *, num_cores: float, memory_bytes: float, mhz: float, features: frozenset[str]
) -> GpuConfig:
    """A CPU's figures from its cores, clock and instruction sets: theoretical dense peaks."""
    per_cycle = next((f for name, f in FP32_FLOPS_PER_CYCLE if name in features), 8.0)
    speedup = next((s for name, s in BF16_SPEEDUP if name in features), 1.0)
    fp32_tflops = num_cores * mhz * 1e6 * per_cycle / 1e12
    bandwidth = num_cores * CPU_MEMORY_BANDWIDTH_GB_PER_SECOND_PER_CORE
    return GpuConfig(
        name="cpu",
        kind="cpu",
        memory_gb=memory_bytes / GB,
        physical_memory_gib=memory_bytes / GIB,
        bf16_tflops=fp32_tflops * speedup,
        fp32_tflops=fp32_tflops,
        memory_bandwidth_gb_per_second=bandwidth,
        intra_node_bandwidth_gb_per_second=bandwidth / 4,
    )


def usable_cores() -> int:
    """Cores that this process may run on, also under a container's limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    is_limited = quota.isdigit() and period.strip().isdigit()
    return min(cores, max(1, int(quota) // int(period))) if is_limited else cores


def usable_memory_bytes() -> int:
    """Memory of this machine, or the container's limit where that is less."""
    limits = [
        _read(Path("/sys/fs/cgroup", name)).strip()
        for name in ("memory.max", "memory/memory.limit_in_bytes")
    ]
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def describe_host() -> dict[str, JsonValue]:
    """This machine in words and numbers: its CPU, usable cores and memory, its GPUs, their driver.

    cpu, num_cores, memory_gb and gpus, a list of names; driver only where there are any.
    """
    name = re.search(r"(?m)^model name\s*:\s*(.*\S)", _read(Path("/proc/cpuinfo")))
    lines = nvidia_smi("--query-gpu=name,driver_version").splitlines()
    gpus = [line.rpartition(", ") for line in lines if ", " in line]
    return {
        "cpu": name.group(1) if name else platform.processor() or platform.machine(),
        "num_cores": usable_cores(),
        "memory_gb": round(usable_memory_bytes() / GB, 1),
        "gpus": [gpu for gpu, _, _ in gpus],
        **({"driver": gpus[0][2]} if gpus else {}),
    }


def nvidia_smi(query: str) -> str:
    """What nvidia-smi prints for a query, an entry a line; nothing where it is not there."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
