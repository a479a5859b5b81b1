"""What this machine has, as a ClusterConfig: its GPUs by nvidia-smi, else its cores and memory.

Owns the reading of the operating system's figures. Imports no torch: planning must start at once.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from herder.config.catalog import cluster_gpu, gpu, gpu_names
from herder.config.run import ClusterConfig, GpuConfig
from herder.units import GB, GIB

ASSUMED_GPU_BF16_TFLOPS = 100.0
"""Peak of a GPU that the catalog does not list. Between an A10 (125) and an RTX 3090 (71)."""
ASSUMED_GPU_MEMORY_BANDWIDTH_GB_PER_SECOND = 800.0
ASSUMED_CPU_MHZ = 2500.0
CPU_MEMORY_BANDWIDTH_GB_PER_SECOND_PER_CORE = 16.0
"""Measured on two EPYC 9004 cores: 31.5 to 33 GB/s of reads."""
FP32_FLOPS_PER_CYCLE = (("avx512f", 64.0), ("avx2", 32.0), ("asimd", 16.0))
"""Two fused multiply-adds of one vector a cycle; the first instruction set present counts.
Source: Intel 64 and IA-32 Optimization Reference Manual, chapter 2; Arm Neoverse V1 guide."""
BF16_SPEEDUP = (("amx_bf16", 16.0), ("avx512_bf16", 2.0), ("bf16", 2.0))
"""bf16 over fp32 rate. Without one of these bf16 is emulated and no faster than fp32."""


def detect_cluster() -> ClusterConfig:
    """This machine: one node with its GPUs, or with one `cpu` device that stands for all cores."""
    gpus = parse_nvidia_smi(_nvidia_smi())
    if gpus:
        return ClusterConfig(nodes=1, gpus_per_node=len(gpus), gpu=gpus[0])
    cpu_info = _read(Path("/proc/cpuinfo"))
    features = re.search(r"(?m)^(?:flags|Features)\s*:\s*(.*)$", cpu_info)
    clock = re.search(r"(?m)^cpu MHz\s*:\s*([0-9.]+)", cpu_info)
    device = cpu_device(
        num_cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        mhz=float(clock.group(1)) if clock else ASSUMED_CPU_MHZ,
        features=frozenset(features.group(1).split()) if features else frozenset(),
    )
    return ClusterConfig(nodes=1, gpus_per_node=1, gpu=device)


def choose_cluster(
    given: ClusterConfig | None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_name: str | None = None,
) -> ClusterConfig:
    """A recipe's cluster with what flags say laid over it; without either, this machine.

    Flags without a recipe's cluster start from one node: of eight GPUs, or of one `cpu`.
    Raises ConfigError when the device is unknown.
    """
    if nodes is None and gpus_per_node is None and gpu_name is None:
        return given or detect_cluster()
    base = given or ClusterConfig()
    device = gpu(gpu_name) if gpu_name is not None else cluster_gpu(base)
    if gpus_per_node is None:
        gpus_per_node = 1 if device.kind == "cpu" else base.gpus_per_node
    return base.model_copy(
        update={"nodes": nodes or base.nodes, "gpus_per_node": gpus_per_node, "gpu": device}
    )


def cpu_device(
    *, num_cores: int, memory_bytes: float, mhz: float, features: frozenset[str]
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


def parse_nvidia_smi(text: str) -> list[GpuConfig]:
    """One entry a line of `name, memory in MiB`. A name outside the catalog gets assumed peaks."""
    devices = []
    for line in text.splitlines():
        name, comma, memory = line.rpartition(",")
        if comma and memory.strip().isdigit():
            devices.append(_device(name.strip(), int(memory) * 2**20))
    return devices


def _device(product: str, memory_bytes: int) -> GpuConfig:
    words = product.lower().replace(" ", "").replace("-", "")
    memory_gb = memory_bytes / GB
    for name in sorted(gpu_names(), key=len, reverse=True):
        model, _, size = name.partition("-")
        if model not in words or (size and abs(float(size[:-2]) - memory_gb) > 10):
            continue
        return gpu(name).model_copy(update={"physical_memory_gib": memory_bytes / GIB})
    return GpuConfig(
        name=f"{product} (not in the catalog: {ASSUMED_GPU_BF16_TFLOPS:.0f} TFLOP/s assumed)",
        memory_gb=memory_gb,
        physical_memory_gib=memory_bytes / GIB,
        bf16_tflops=ASSUMED_GPU_BF16_TFLOPS,
        memory_bandwidth_gb_per_second=ASSUMED_GPU_MEMORY_BANDWIDTH_GB_PER_SECOND,
        intra_node_bandwidth_gb_per_second=32.0,
    )


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
