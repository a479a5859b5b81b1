"""How much of a device's peaks real kernels reach: the named constants of step-time simulation.

Each constant prices one mechanism, so that a calibration moves one without the others.
"""

from __future__ import annotations

from herder.config.run import GpuConfig

MATMUL_PEAK_SHARE = {
    "a100": 0.83,
    "v100": 0.75,
    "h100": 0.70,
    "h200": 0.72,
    "h800": 0.70,
    "b200": 0.72,
    "b300": 0.72,
    "gb200": 0.72,
    "gb300": 0.72,
    "mi300x": 0.55,
}
"""Large bf16 products over the dense peak. Hopper and later lower their clock under this load.
Source: cuBLAS at 8,192 cubed, about 260 of 312 TFLOP/s on A100 and 690 of 989 on H100; MI300X about
710 of 1,307 (SemiAnalysis, MI300X vs H100 vs H200, December 2024)."""
OTHER_MATMUL_PEAK_SHARE = 0.70
CPU_MATMUL_PEAK_SHARE = 0.80
"""Measured on two cores of an EPYC 9004: 177 to 192 GFLOP/s in fp32, over twice that in bf16."""
ATTENTION_PEAK_SHARE = 0.50
"""Fused causal attention over the dense peak, forward and backward together.
Source: FlashAttention-2, arXiv:2307.08691, figures 4 to 6 (A100: 48 to 63 %)."""
GROUPED_MATMUL_SHARE = 0.75
"""Expert products against one product of the same size, at full tiles."""
MATMUL_TILE = 128
"""Rows and columns of a product are padded to whole tiles on a GPU."""
MEMORY_BANDWIDTH_SHARE = 0.80
"""Of the nominal bandwidth, for kernels that stream."""
COLLECTIVE_BANDWIDTH_SHARE = 0.75
"""Bus bandwidth of NCCL over the link's nominal one direction, large messages."""
OVERLAP_SHARE = 0.80
"""How much of the computation beside a data-parallel collective can hide it: the two compete for
memory bandwidth and multiprocessors."""
MIN_EXPOSED_SHARE = 0.05
"""Of a hidden collective that shows anyway: the first gather and the last reduction have nothing
to hide behind."""
KERNELS_PER_LAYER = 60
"""Launched for one layer, forward and backward, in eager PyTorch."""
LAUNCH_SECONDS = 5e-6
"""Host time of one kernel launch."""
OPTIMIZER_TRAFFIC_BYTES = 30
"""AdamW on one parameter: reads gradient, master copy and two moments, writes the latter three and
the bf16 parameter."""


def matmul_peak_share(gpu: GpuConfig) -> float:
    """Of the dense peak, for large matrix products on this device."""
    if gpu.kind == "cpu":
        return CPU_MATMUL_PEAK_SHARE
    return MATMUL_PEAK_SHARE.get(gpu.name.partition("-")[0], OTHER_MATMUL_PEAK_SHARE)
