"""Checkpoint interval and goodput from failure rates.

Owns the formulas of Young and Daly and the default costs of saving and restarting, which measured
ones replace. Sanity: Llama 3 met 419 interruptions in 54 days on 16,384 GPUs and kept over 90 %
effective time, arXiv:2407.21783, section 3.3.4; OPT-175B restarted at least 105 times in two months
on 992 A100s, arXiv:2205.01068, section 2.5.
"""

from __future__ import annotations

from math import sqrt

from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig
from herder.units import GB

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""fp32 parameters and two moments."""
STORAGE_GB_PER_SECOND_PER_NODE = 2.0
"""What one node writes: one NVMe disk, or its part of a shared file system."""
STORAGE_GB_PER_SECOND = 2000.0
"""What shared storage takes from all nodes together. Source: Llama 3's Tectonic, 2 TB/s sustained
and 7 TB/s at peak, arXiv:2407.21783, section 3.3.1."""
CPU_MACHINE_GB_PER_SECOND = 0.5
"""What a laptop or a small virtual machine writes."""
RESTART_SECONDS = 600.0
"""From a failure to the first new step: noticing, replacing the node, starting ranks, loading."""


class Reliability(Record):
    """What failures are expected to cost."""

    mean_time_between_failures_hours: float
    """Of the whole cluster."""
    checkpoint_gb: float
    save_seconds: float
    restart_seconds: float
    checkpoint_interval_seconds: float
    checkpoint_interval_steps: int
    goodput: float
    """Share of wall time spent on steps that count."""


def young_daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds between checkpoints that lose least: sqrt(2 x save x MTBF).

    Source: Young, Communications of the ACM 17(9), 1974; Daly, FGCS 22(3), 2006, equation 13.
    """
    return sqrt(2 * save_seconds * mtbf_seconds)


def expected_goodput(
    *, interval_seconds: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Share of time that counts: saves are paid each interval, a failure costs half an interval,
    a half save and a restart. First order in interval / MTBF; 0 when failures leave nothing."""
    useful = interval_seconds / (interval_seconds + save_seconds)
    lost = ((interval_seconds + save_seconds) / 2 + restart_seconds) / mtbf_seconds
    return max(0.0, useful * (1 - lost))


def save_seconds(checkpoint_bytes: float, cluster: ClusterConfig) -> float:
    """Time that training stands still for one save, while nobody has measured it."""
    is_cpu = cluster_gpu(cluster).kind == "cpu"
    each = CPU_MACHINE_GB_PER_SECOND if is_cpu else STORAGE_GB_PER_SECOND_PER_NODE
    together = min(each * cluster.nodes, STORAGE_GB_PER_SECOND)
    return checkpoint_bytes / (together * GB)


def plan_reliability(
    num_parameters: int,
    cluster: ClusterConfig,
    *,
    step_seconds: float,
    measured_save_seconds: float | None = None,
) -> Reliability:
    """The interval to save at and the goodput to expect, a whole number of steps apart."""
    mtbf = cluster.node_mtbf_hours * 3600 / cluster.nodes
    num_bytes = num_parameters * CHECKPOINT_BYTES_PER_PARAMETER
    save = measured_save_seconds or save_seconds(num_bytes, cluster)
    steps = max(1, round(young_daly_interval(save, mtbf) / step_seconds))
    return Reliability(
        mean_time_between_failures_hours=mtbf / 3600,
        checkpoint_gb=num_bytes / GB,
        save_seconds=save,
        restart_seconds=RESTART_SECONDS,
        checkpoint_interval_seconds=steps * step_seconds,
        checkpoint_interval_steps=steps,
        goodput=expected_goodput(
            interval_seconds=steps * step_seconds,
            save_seconds=save,
            restart_seconds=RESTART_SECONDS,
            mtbf_seconds=mtbf,
        ),
    )
