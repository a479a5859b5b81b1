"""Which cluster a command means: what flags and recipe say, or this machine with its GPUs or CPU.

Owns what nvidia-smi tells. Imports no torch: planning must start at once.
"""

from __future__ import annotations

from herder.config.catalog import cluster_gpu, gpu, gpu_names
from herder.config.machine import cpu_share, nvidia_smi
from herder.config.run import ClusterConfig, GpuConfig
from herder.units import GB, GIB

ASSUMED_GPU_BF16_TFLOPS = 100.0
"""Peak of a GPU that the catalog does not list. Between an A10 (125) and an RTX 3090 (71)."""
ASSUMED_GPU_MEMORY_BANDWIDTH_GB_PER_SECOND = 800.0


def detect_cluster() -> ClusterConfig:
    """This machine: one node with its GPUs, or with one `cpu` device that stands for all cores."""
    gpus = parse_nvidia_smi(nvidia_smi("--query-gpu=name,memory.total"))
    if gpus:
        return ClusterConfig(nodes=1, gpus_per_node=len(gpus), gpu=gpus[0])
    return ClusterConfig(nodes=1, gpus_per_node=1, gpu=cpu_share(1))


def choose_cluster(
    given: ClusterConfig | None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_name: str | None = None,
) -> ClusterConfig:
    """A recipe's cluster with what flags say laid over it; without either, this machine.

    Flags without a recipe's cluster start from one node: of eight GPUs, or of one `cpu`, whose
    ranks share what one machine like this has. Raises ConfigError when the device is unknown.
    """
    if nodes is None and gpus_per_node is None and gpu_name is None:
        return given or detect_cluster()
    base = given or ClusterConfig()
    named = base.model_copy(update={"nodes": nodes or base.nodes, "gpu": gpu_name or base.gpu})
    if gpus_per_node is None:
        becomes_cpu = cluster_gpu(named).kind == "cpu" != cluster_gpu(base).kind
        gpus_per_node = 1 if becomes_cpu else base.gpus_per_node
    chosen = named.model_copy(update={"gpus_per_node": gpus_per_node})
    return chosen.model_copy(update={"gpu": cluster_gpu(chosen)})


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
