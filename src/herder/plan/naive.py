"""What nn.DataParallel would take of each device, before it takes it: the first one's excess.

The first device has the parameters, their gradients and the optimizer's state, and every device's
outputs are gathered on it; the others have a copy of the parameters and its gradient. Owns that
count, its table, and what may not be trained so.
"""

from __future__ import annotations

from collections.abc import Sequence

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.memory import MemoryGb
from herder.units import GB

SHOWN_DEVICES = 8
"""For how many the imbalance is shown where there is no GPU: the usual node."""
_PARAMETER_BYTES = 4
"""Parameters, their copies and gradients are in fp32; bf16 products are autocast's work."""


class NaiveDevice(Record):
    """GB (1e9 bytes) on one device at the peak of a step."""

    device: int
    state: float
    """Parameters, gradients, optimizer state; of the others a copy of parameters, and gradients."""
    activations: float
    outputs: float
    """Hidden states of all devices with their gradients, and a chunk of logits."""
    other: float
    """Autocast's copies, device context."""

    @property
    def total(self) -> float:
        """Of all parts."""
        return self.state + self.activations + self.outputs + self.other


def one_driving_device(
    architecture: ArchitectureConfig, cluster: ClusterConfig, train: TrainConfig
) -> ClusterConfig:
    """The one device that a naive layout is planned for: its process drives the others.

    Raises PlanError for what copies of modules that live for one forward cannot do.
    """
    asked = {
        "cluster.nodes": cluster.nodes > 1,
        "train.compile": train.compile,
        "train.recompute=full": train.recompute == "full",
        "a model with routed experts": architecture.moe is not None,
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise PlanError(
            f"layout: naive is nn.DataParallel, one process whose threads copy a dense model to "
            f"every device at each step: it cannot do {', '.join(refused)}. It is here to be "
            "compared with; --set layout=auto trains the same model on the same devices."
        )
    return cluster.model_copy(update={"nodes": 1, "gpus_per_node": 1})


def num_naive_devices(cluster: ClusterConfig) -> int:
    """How many devices the prediction is for: the cluster's, or a usual node's."""
    if cluster_gpu(cluster).kind == "cpu":
        return SHOWN_DEVICES
    return cluster.gpus_per_node


def naive_memory(
    memory: MemoryGb,
    *,
    parameters: int,
    hidden_size: int,
    micro_batch_tokens: int,
    num_devices: int,
) -> tuple[NaiveDevice, ...]:
    """Each device's memory. memory: of the same run on one device; activations are the same on all.

    Residual streams are in fp32, under autocast too.
    """
    copy = _PARAMETER_BYTES * parameters / GB
    gathered = 2 * num_devices * micro_batch_tokens * hidden_size * 4 / GB
    is_gathered = num_devices > 1
    first = NaiveDevice(
        device=0,
        state=memory.largest_rank_state,
        activations=memory.activations,
        outputs=memory.logits + gathered * is_gathered,
        other=memory.buffers + memory.overhead,
    )
    others = (
        NaiveDevice(
            device=device,
            state=2 * copy,
            activations=memory.activations,
            outputs=0.0,
            other=memory.buffers + memory.overhead,
        )
        for device in range(1, num_devices)
    )
    return (first, *others)


def describe_naive(devices: Sequence[NaiveDevice]) -> list[str]:
    """The imbalance as lines of a table, one a device; those alike share one."""
    first, *others = devices
    rows = [("device 0", first)]
    if others:
        last = others[-1].device
        rows.append((f"device {'1' if last == 1 else f'1 to {last}'}", others[0]))
    lines = [f"nn.DataParallel on {len(devices)} devices, GB predicted on each:"]
    for name, each in rows:
        parts = {
            "state": each.state,
            "activations": each.activations,
            "outputs": each.outputs,
            "other": each.other,
            "total": each.total,
        }
        told = "  ".join(f"{part} {value:7.2f}" for part, value in parts.items())
        lines.append(f"  {name:<13} {told}")
    if others:
        ratio = first.total / others[0].total
        lines.append(
            f"  device 0 takes {ratio:.1f} x the memory of each other, whose room stays unused"
        )
    return lines
