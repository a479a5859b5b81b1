"""Seconds of one optimizer step, mechanism by mechanism.

Owns the simulation: matrix products by shape, attention, streamed memory, kernel launches, each
mesh axis's communication, what hides behind what, the pipeline's bubble, the optimizer; and how
much of a device's peaks real kernels reach. Each constant prices one mechanism, so that a
calibration moves one without the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from herder.config.architecture import LayerSpec
from herder.config.record import Record
from herder.config.run import ClusterConfig, GpuConfig
from herder.plan.candidate import Candidate, Precision
from herder.plan.flops import (
    TRAINING_PASSES,
    attention_flops_per_key,
    key_value_elements,
    mean_keys,
)
from herder.plan.layout import fast_domain_size
from herder.plan.memory import LOGIT_BYTES, layer_bytes_per_token, shared_out
from herder.plan.parameters import Weight
from herder.plan.pipeline import waiting_micro_batches
from herder.plan.stages import RankParameters
from herder.units import GB, TFLOP

MATMUL_PEAK_SHARE = {
    **dict.fromkeys(("h100", "h800"), 0.70),
    **dict.fromkeys(("h200", "b200", "b300", "gb200", "gb300"), 0.72),
    "a100": 0.83,
    "v100": 0.75,
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


class StepTimeSeconds(Record):
    """Seconds on the critical path of one optimizer step."""

    matmul: float
    attention: float
    memory_traffic: float
    """Norms, activations, rotations, the loss: bound by memory bandwidth."""
    recompute: float
    launch: float
    """Host time that the device waits for."""
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_transfer: float
    pipeline_bubble: float
    data_parallel: float
    """What computation does not hide of gathering parameters and reducing gradients."""
    optimizer: float
    total: float


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that communicate together."""

    num_ranks: int
    num_inside: int
    """Of them, how many share a fast domain."""
    inside_bytes_per_second: float
    """What one device sends to others of its domain."""
    outside_bytes_per_second: float
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of a collective that all devices of a domain take part in, each over its own link."""
        if self.num_ranks == self.num_inside:
            return self.inside_bytes_per_second
        return min(self.inside_bytes_per_second, self.outside_bytes_per_second * self.num_inside)

    def seconds(self, num_bytes: float, calls: float = 1) -> float:
        """A gather or reduce-scatter of `num_bytes` in all, in `calls` pieces."""
        if self.num_ranks == 1:
            return 0.0
        moved = num_bytes * (self.num_ranks - 1) / self.num_ranks
        return moved / self.bytes_per_second + calls * self.latency_seconds

    def exchange_seconds(self, num_bytes: float, calls: float) -> float:
        """An all-to-all in which each device sends `num_bytes`, evenly: most of them leave its
        domain over its one link."""
        each = num_bytes / self.num_ranks
        inside = each * (self.num_inside - 1) / self.inside_bytes_per_second
        outside = each * (self.num_ranks - self.num_inside) / self.outside_bytes_per_second
        return inside + outside + calls * self.latency_seconds


def collective(cluster: ClusterConfig, gpu: GpuConfig, num_ranks: int, stride: int) -> Group:
    """The group of `num_ranks` devices that lie `stride` apart."""
    inside = max(1, min(num_ranks, fast_domain_size(cluster) // stride))
    domains = ceil(num_ranks / inside)
    hops = cluster.intra_node_latency_microseconds * (inside - 1)
    hops += cluster.inter_node_latency_microseconds * (domains - 1)
    return Group(
        num_ranks,
        inside,
        gpu.intra_node_bandwidth_gb_per_second * GB * COLLECTIVE_BANDWIDTH_SHARE,
        cluster.inter_node_bandwidth_gb_per_second * GB * COLLECTIVE_BANDWIDTH_SHARE,
        hops * 1e-6,
    )


def peak_flops(gpu: GpuConfig, precision: Precision) -> float:
    """Dense FLOP/s of a device's matrix products. Without a fp32 figure, half of bf16."""
    fp32_tflops = gpu.fp32_tflops or gpu.bf16_tflops / 2
    return (fp32_tflops if precision == "fp32" else gpu.bf16_tflops) * TFLOP


def simulate_step(candidate: Candidate) -> StepTimeSeconds:
    """The parts of a step. `total` is their sum."""
    sizes = candidate.request.sizes
    of_layer = {layer: _layer_seconds(candidate, layer) for layer in sizes.kinds}
    stages = (_Stage.priced(candidate, stage, of_layer) for stage in candidate.distinct_stages())
    return max(stages, key=lambda stage: stage.compute).step()


_Work = tuple[float, float, float]
"""Seconds of matrix products, attention and memory traffic of a micro-batch, all passes."""


def _layer_seconds(candidate: Candidate, layer: LayerSpec) -> _Work:
    """What one layer computes on one rank."""
    request, tokens = candidate.request, candidate.local_tokens
    tp, sizes = candidate.layout.tensor_parallel_size, request.sizes
    weights = sizes.kinds[layer].items()
    matmul = sum(times * _matmul_seconds(candidate, weight) for weight, times in weights)
    per_key = attention_flops_per_key(sizes.architecture) / tp
    scores = per_key * tokens * mean_keys(layer, request.train.sequence_length)
    peak = peak_flops(request.gpu, request.train.precision) * ATTENTION_PEAK_SHARE
    traffic = 2 * tokens * layer_bytes_per_token(candidate, layer)
    return _all_passes(matmul, scores / peak, traffic / _memory_bytes_per_second(request.gpu))


def _head_seconds(candidate: Candidate) -> _Work:
    """The same of the head and its loss."""
    architecture, tp = candidate.request.sizes.architecture, candidate.layout.tensor_parallel_size
    head = Weight("head", (architecture.vocab_size, architecture.hidden_size), "out")
    traffic = candidate.local_tokens * architecture.vocab_size / tp * LOGIT_BYTES
    seconds = traffic / _memory_bytes_per_second(candidate.request.gpu)
    return _all_passes(_matmul_seconds(candidate, head), 0.0, seconds)


def _all_passes(matmul: float, attention: float, traffic: float) -> _Work:
    return matmul * TRAINING_PASSES, attention * TRAINING_PASSES, traffic * TRAINING_PASSES


@dataclass(frozen=True, slots=True)
class _Stage:
    """Forward and backward of one micro-batch on one stage's rank, in seconds."""

    candidate: Candidate
    stage: int
    matmul: float
    attention: float
    traffic: float

    @classmethod
    def priced(
        cls, candidate: Candidate, stage: int, of_layer: Mapping[LayerSpec, _Work]
    ) -> _Stage:
        """The stage's own computation."""
        work = [(of_layer[layer], n) for layer, n in candidate.stage_layers(stage).items()]
        if stage == candidate.layout.pipeline_parallel_size - 1:
            work.append((_head_seconds(candidate), 1))
        sums = (sum(times * part[kind] for part, times in work) for kind in range(3))
        return cls(candidate, stage, *sums)

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.traffic

    @property
    def layers(self) -> Counter[LayerSpec]:
        return self.candidate.stage_layers(self.stage)

    @property
    def parameters(self) -> RankParameters:
        """Of one rank."""
        return self.candidate.stage_parameters(self.stage)

    def group(self, num_ranks: int, stride: int) -> Group:
        """Ranks of one mesh axis."""
        request = self.candidate.request
        return collective(request.cluster, request.gpu, num_ranks, stride)

    @property
    def residual_bytes(self) -> float:
        """Of a micro-batch's residual stream as it is communicated, before TP splits it."""
        hidden = self.candidate.request.sizes.architecture.hidden_size
        return self.candidate.local_tokens * hidden * self.candidate.compute_bytes

    def step(self) -> StepTimeSeconds:
        """A whole step in which no stage takes longer than this one."""
        candidate, gpu = self.candidate, self.candidate.request.gpu
        recompute = self.compute / TRAINING_PASSES if candidate.recompute == "full" else 0.0
        of_micro_batch = {
            "matmul": self.matmul,
            "attention": self.attention,
            "memory_traffic": self.traffic,
            "recompute": recompute,
            "tensor_parallel": self._tensor_parallel(),
            "context_parallel": self._context_parallel(),
            "expert_parallel": self._expert_parallel(),
        }
        each = sum(of_micro_batch.values())
        host = self.layers.total() * KERNELS_PER_LAYER * LAUNCH_SECONDS
        of_micro_batch["launch"] = 0.0 if gpu.kind == "cpu" else max(0.0, host - each)
        stages = candidate.layout.pipeline_parallel_size
        waiting = waiting_micro_batches(candidate.schedule, stages)
        parts = {
            **{name: part * candidate.num_micro_batches for name, part in of_micro_batch.items()},
            "pipeline_transfer": self._pipeline_transfer(),
            "pipeline_bubble": waiting * sum(of_micro_batch.values()),
            "data_parallel": self._data_parallel(each),
            "optimizer": self._optimizer(),
        }
        return StepTimeSeconds(**parts, total=sum(parts.values()))

    def _tensor_parallel(self) -> float:
        """Two gathers and two reduce-scatters a layer in each pass, none of them hidden.

        Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
        """
        passes = 3 if self.candidate.recompute == "full" else 2
        calls = 4 * passes * self.layers.total()
        group = self.group(self.candidate.layout.tensor_parallel_size, 1)
        return group.seconds(self.residual_bytes * calls, calls)

    def _context_parallel(self) -> float:
        """Keys and values pass around a ring behind attention. Source: arXiv:2310.01889."""
        layout, architecture = self.candidate.layout, self.candidate.request.sizes.architecture
        tp, layers = layout.tensor_parallel_size, self.layers.total()
        elements = key_value_elements(architecture, tensor_parallel_size=tp)
        ring = self.candidate.micro_batch_tokens * elements * 2 * layers
        group = self.group(layout.context_parallel_size, tp)
        return max(0.0, group.seconds(ring * 3, 3 * layers) - self.attention)

    def _expert_parallel(self) -> float:
        """Dispatch and combine in each pass: all-to-all of k copies of each token, between ranks
        that are neighbours but for TP."""
        layout, moe = self.candidate.layout, self.candidate.request.sizes.architecture.moe
        if moe is None or layout.expert_parallel_size == 1:
            return 0.0
        routed = sum(n for layer, n in self.layers.items() if layer.feed_forward == "routed")
        calls = 2 * routed * (3 if self.candidate.recompute == "full" else 2)
        tp = layout.tensor_parallel_size
        group = self.group(layout.expert_parallel_size, tp)
        copies = self.residual_bytes / tp * moe.num_experts_per_token
        return group.exchange_seconds(calls * copies, calls)

    def _pipeline_transfer(self) -> float:
        """Filling and draining: one activation and one gradient between neighbouring stages."""
        layout = self.candidate.layout
        link = self.group(2, layout.num_ranks // layout.pipeline_parallel_size)
        each = self.residual_bytes / layout.tensor_parallel_size
        seconds = each / link.bytes_per_second + link.latency_seconds
        stages = layout.pipeline_parallel_size * self.candidate.chunks
        return 2 * (stages - 1) * seconds

    def _data_parallel(self, micro_batch_seconds: float) -> float:
        """Stages 0 to 2 gather and reduce once a step, 3 gathers twice a micro-batch and reduces.

        Source: ZeRO, arXiv:1910.02054, section 7 (volumes).
        """
        layout, widths, parameters = self.candidate.layout, self.candidate.widths, self.parameters
        blocks, ep = self.layers.total() + 1, layout.expert_parallel_size
        everyone = self.group(layout.num_shards, layout.tensor_parallel_size)
        same_experts = self.group(layout.num_shards // ep, layout.tensor_parallel_size * ep)

        def seconds(width: int) -> float:
            """Of one round over all parameters in numbers of `width` bytes."""
            experts = same_experts.seconds(parameters.experts * width, blocks)
            return everyone.seconds(parameters.dense * width, blocks) + experts

        gradient_bytes = self.candidate.gradient_bytes
        reduce, gather = seconds(gradient_bytes), seconds(widths.parameter)
        copies = self.group(
            layout.data_parallel_replicas, layout.num_shards * layout.tensor_parallel_size
        )
        reduce += 2 * copies.seconds(shared_out(parameters, layout) * gradient_bytes, blocks)
        sharded = layout.zero_stage == 3
        rounds = self.candidate.num_micro_batches if sharded else 1
        communication = rounds * (reduce + (2 * gather if sharded else gather))
        hidden = rounds * micro_batch_seconds * OVERLAP_SHARE
        return max(communication - hidden, MIN_EXPOSED_SHARE * communication)

    def _optimizer(self) -> float:
        layout, parameters = self.candidate.layout, self.parameters
        kept = shared_out(parameters, layout) if layout.zero_stage > 0 else parameters.total
        traffic = kept * OPTIMIZER_TRAFFIC_BYTES
        return traffic / _memory_bytes_per_second(self.candidate.request.gpu)


def _memory_bytes_per_second(gpu: GpuConfig) -> float:
    return gpu.memory_bandwidth_gb_per_second * GB * MEMORY_BANDWIDTH_SHARE


def _matmul_seconds(candidate: Candidate, weight: Weight) -> float:
    """One forward product: padded FLOPs at the reachable rate, or its bytes if that is longer."""
    if not weight.is_matmul:
        return 0.0
    request, layout, rows = candidate.request, candidate.layout, float(candidate.local_tokens)
    gpu, sizes, products, tile = request.gpu, request.sizes, 1.0, MATMUL_TILE
    share = MATMUL_PEAK_SHARE.get(gpu.name.partition("-")[0], OTHER_MATMUL_PEAK_SHARE)
    if gpu.kind == "cpu":
        share, tile = CPU_MATMUL_PEAK_SHARE, 1
    outputs, inputs = weight.used_shape(
        tp=layout.tensor_parallel_size, num_key_value_heads=sizes.num_key_value_heads
    )
    if weight.copies > 1:
        moe = sizes.architecture.moe
        assert moe is not None, "expert weights without moe"
        products = weight.copies / layout.expert_parallel_size
        rows = rows * moe.num_experts_per_token / products
        share *= GROUPED_MATMUL_SHARE
    padded = ceil(rows / tile) * tile * ceil(outputs / tile) * tile * inputs
    moved = candidate.compute_bytes * (rows * inputs + inputs * outputs + rows * outputs)
    compute = 2 * padded / (peak_flops(gpu, request.train.precision) * share)
    return products * max(compute, moved / _memory_bytes_per_second(gpu))
