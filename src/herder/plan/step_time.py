"""Seconds of one optimizer step, mechanism by mechanism.

Owns the simulation: matrix products by shape, attention, streamed memory, kernel launches, each
mesh axis's communication, what hides behind what, the pipeline's bubble, the optimizer. The shares
of peak come from efficiency.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from herder.config.architecture import LayerSpec
from herder.config.catalog import cluster_gpu
from herder.config.record import Record
from herder.config.run import ClusterConfig, GpuConfig
from herder.plan import efficiency
from herder.plan.activations import LOGIT_BYTES, layer_bytes_per_token
from herder.plan.flops import (
    TRAINING_PASSES,
    attention_flops_per_key,
    key_value_elements,
    mean_keys,
)
from herder.plan.layout import Layout, fast_domain_size
from herder.plan.memory import Workload, activation_widths, state_widths
from herder.plan.parameters import Weight
from herder.plan.stages import ModelSizes
from herder.units import GB, TFLOP


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
class Hardware:
    """A cluster's rates, as a layout meets them."""

    gpu: GpuConfig
    cluster: ClusterConfig
    peak_flops: float
    """Per second and device, at the precision of the matrix products."""

    @property
    def memory_bytes_per_second(self) -> float:
        share = efficiency.MEMORY_BANDWIDTH_SHARE
        return self.gpu.memory_bandwidth_gb_per_second * GB * share

    def collective(self, num_ranks: int, stride: int) -> Group:
        """The group of `num_ranks` devices that lie `stride` apart."""
        domain = fast_domain_size(self.cluster)
        inside = max(1, min(num_ranks, domain // stride))
        fast = self.gpu.intra_node_bandwidth_gb_per_second
        slow = min(fast, self.cluster.inter_node_bandwidth_gb_per_second * inside)
        domains = ceil(num_ranks / inside)
        hop = self.cluster.intra_node_latency_microseconds * (inside - 1)
        hop += self.cluster.inter_node_latency_microseconds * (domains - 1)
        width = (fast if domains == 1 else slow) * GB * efficiency.COLLECTIVE_BANDWIDTH_SHARE
        return Group(num_ranks, width, hop * 1e-6)


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that communicate together."""

    num_ranks: int
    bytes_per_second: float
    latency_seconds: float

    def seconds(self, num_bytes: float, calls: float = 1) -> float:
        """A gather, reduce-scatter or all-to-all of `num_bytes` in all, in `calls` pieces."""
        if self.num_ranks == 1:
            return 0.0
        moved = num_bytes * (self.num_ranks - 1) / self.num_ranks
        return moved / self.bytes_per_second + calls * self.latency_seconds


def hardware(cluster: ClusterConfig, workload: Workload) -> Hardware:
    """The cluster's device at the workload's precision. Without a fp32 figure, half of bf16."""
    gpu = cluster_gpu(cluster)
    tflops = gpu.bf16_tflops
    if workload.precision == "fp32":
        tflops = gpu.fp32_tflops or gpu.bf16_tflops / 2
    return Hardware(gpu, cluster, tflops * TFLOP)


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """Forward and backward of one micro-batch on the busiest stage."""

    matmul: float
    attention: float
    traffic: float
    layers: int

    @property
    def compute(self) -> float:
        return self.matmul + self.attention + self.traffic


def simulate_step(
    sizes: ModelSizes, layout: Layout, workload: Workload, cluster: ClusterConfig
) -> StepTimeSeconds:
    """The parts of a step under this layout. `total` is their sum."""
    rates = hardware(cluster, workload)
    stage, batch = _busiest_stage(sizes, layout, workload, rates)
    times = workload.num_micro_batches
    tensor = _tensor_parallel(sizes, layout, workload, rates, batch.layers)
    expert = _expert_parallel(sizes, layout, workload, rates, stage)
    context = _context_parallel(sizes, layout, workload, rates, batch)
    recompute = batch.compute / TRAINING_PASSES if workload.recompute == "full" else 0.0
    each = batch.compute + recompute + tensor + expert + context
    host = batch.layers * efficiency.KERNELS_PER_LAYER * efficiency.LAUNCH_SECONDS
    launch = 0.0 if rates.gpu.kind == "cpu" else max(0.0, host - each)
    pp = layout.pipeline_parallel_size
    parts = {
        "matmul": batch.matmul * times,
        "attention": batch.attention * times,
        "memory_traffic": batch.traffic * times,
        "recompute": recompute * times,
        "launch": launch * times,
        "tensor_parallel": tensor * times,
        "context_parallel": context * times,
        "expert_parallel": expert * times,
        "pipeline_transfer": _pipeline_transfer(sizes, layout, workload, rates),
        "pipeline_bubble": (pp - 1) * (each + launch),
        "data_parallel": _data_parallel(sizes, layout, workload, rates, stage, each),
        "optimizer": _optimizer(sizes, layout, rates, stage),
    }
    return StepTimeSeconds(**parts, total=sum(parts.values()))


def _busiest_stage(
    sizes: ModelSizes, layout: Layout, workload: Workload, rates: Hardware
) -> tuple[int, _MicroBatch]:
    stages = sizes.distinct_stages(layout.pipeline_parallel_size)
    priced = [(s, _stage_compute(sizes, layout, workload, rates, s)) for s in stages]
    return max(priced, key=lambda entry: entry[1].compute)


def _stage_compute(
    sizes: ModelSizes, layout: Layout, workload: Workload, rates: Hardware, stage: int
) -> _MicroBatch:
    architecture, tp = sizes.architecture, layout.tensor_parallel_size
    tokens = workload.micro_batch_tokens / layout.context_parallel_size
    layers = sizes.stage_layers(layout.pipeline_parallel_size)[stage]
    per_key = attention_flops_per_key(architecture) / tp
    widths = activation_widths(layout, workload.precision)
    matmul = scores = traffic = 0.0
    for layer, times in layers.items():
        matmul += times * _layer_matmul_seconds(sizes, layout, rates, layer, tokens, widths.compute)
        scores += times * per_key * tokens * mean_keys(layer, workload.sequence_length, "causal")
        saved = layer_bytes_per_token(architecture, layer, tp=tp, widths=widths)
        traffic += times * tokens * saved * 2
    if stage == layout.pipeline_parallel_size - 1:
        head = Weight("head", (architecture.vocab_size, architecture.hidden_size), "out")
        matmul += _matmul_seconds(sizes, layout, rates, head, tokens, widths.compute)
        traffic += tokens * architecture.vocab_size / tp * LOGIT_BYTES
    attention_rate = rates.peak_flops * efficiency.ATTENTION_PEAK_SHARE
    return _MicroBatch(
        matmul=matmul * TRAINING_PASSES,
        attention=scores * TRAINING_PASSES / attention_rate,
        traffic=traffic * TRAINING_PASSES / rates.memory_bytes_per_second,
        layers=layers.total(),
    )


def _layer_matmul_seconds(
    sizes: ModelSizes,
    layout: Layout,
    rates: Hardware,
    layer: LayerSpec,
    tokens: float,
    element_bytes: int,
) -> float:
    """Forward products of one layer, priced once for all layouts that split it alike."""
    split = (layout.tensor_parallel_size, layout.expert_parallel_size)
    key = (layer, *split, tokens, element_bytes, rates.gpu.name, rates.peak_flops)
    if key not in sizes.layer_seconds:
        sizes.layer_seconds[key] = sum(
            _matmul_seconds(sizes, layout, rates, weight, tokens, element_bytes)
            for weight in sizes.kinds[layer]
        )
    return sizes.layer_seconds[key]


def _matmul_seconds(
    sizes: ModelSizes,
    layout: Layout,
    rates: Hardware,
    weight: Weight,
    tokens: float,
    element_bytes: int,
) -> float:
    """One forward product: padded FLOPs at the reachable rate, or its bytes if that is longer."""
    if not weight.is_matmul:
        return 0.0
    rows, share = tokens, efficiency.matmul_peak_share(rates.gpu)
    products, (outputs, inputs) = 1.0, map(float, weight.shape)
    tp = layout.tensor_parallel_size
    if weight.split == "in":
        inputs /= tp
    elif weight.split != "none":
        outputs /= min(tp, sizes.num_key_value_heads) if weight.split == "kv_out" else tp
    if weight.copies > 1:
        moe = sizes.architecture.moe
        assert moe is not None, "expert weights without moe"
        products = weight.copies / layout.expert_parallel_size
        rows = tokens * moe.num_experts_per_token / products
        share *= efficiency.GROUPED_MATMUL_SHARE
    tile = 1 if rates.gpu.kind == "cpu" else efficiency.MATMUL_TILE
    padded = ceil(rows / tile) * tile * ceil(outputs / tile) * tile * inputs
    moved = element_bytes * (rows * inputs + inputs * outputs + rows * outputs)
    compute = 2 * padded / (rates.peak_flops * share)
    return products * max(compute, moved / rates.memory_bytes_per_second)


def _residual_bytes(sizes: ModelSizes, layout: Layout, workload: Workload) -> float:
    tokens = workload.micro_batch_tokens / layout.context_parallel_size
    compute = activation_widths(layout, workload.precision).compute
    return tokens * sizes.architecture.hidden_size * compute


def _tensor_parallel(
    sizes: ModelSizes, layout: Layout, workload: Workload, rates: Hardware, layers: int
) -> float:
    """Two gathers and two reduce-scatters a layer in each pass, none of them hidden.

    Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
    """
    group = rates.collective(layout.tensor_parallel_size, 1)
    passes = 3 if workload.recompute == "full" else 2
    calls = 4 * passes * layers
    return group.seconds(_residual_bytes(sizes, layout, workload) * calls, calls)


def _context_parallel(
    sizes: ModelSizes, layout: Layout, workload: Workload, rates: Hardware, batch: _MicroBatch
) -> float:
    """Keys and values pass around a ring behind attention. Source: arXiv:2310.01889, section 3."""
    cp = layout.context_parallel_size
    tp = layout.tensor_parallel_size
    group = rates.collective(cp, tp)
    elements = key_value_elements(sizes.architecture, tensor_parallel_size=tp)
    ring = workload.micro_batch_tokens * elements * 2 * batch.layers
    return max(0.0, group.seconds(ring * 3, 3 * batch.layers) - batch.attention)


def _expert_parallel(
    sizes: ModelSizes, layout: Layout, workload: Workload, rates: Hardware, stage: int
) -> float:
    """Dispatch and combine, forward and backward: all-to-all of k copies of each token."""
    moe = sizes.architecture.moe
    if moe is None or layout.expert_parallel_size == 1:
        return 0.0
    layers = sizes.stage_layers(layout.pipeline_parallel_size)[stage]
    routed = sum(n for layer, n in layers.items() if layer.feed_forward == "routed")
    stride = layout.tensor_parallel_size * layout.context_parallel_size
    group = rates.collective(layout.expert_parallel_size, stride)
    copies = _residual_bytes(sizes, layout, workload) * moe.num_experts_per_token
    calls = 4 * routed
    return group.seconds(copies / layout.tensor_parallel_size * calls, calls)


def _pipeline_transfer(
    sizes: ModelSizes, layout: Layout, workload: Workload, rates: Hardware
) -> float:
    """Filling and draining: one activation and one gradient between neighbouring stages."""
    hops = layout.pipeline_parallel_size - 1
    stride = layout.num_ranks // layout.pipeline_parallel_size
    link = rates.collective(2, stride)
    each = _residual_bytes(sizes, layout, workload) / layout.tensor_parallel_size
    return 2 * hops * (each / link.bytes_per_second + link.latency_seconds)


def _data_parallel(
    sizes: ModelSizes,
    layout: Layout,
    workload: Workload,
    rates: Hardware,
    stage: int,
    micro_batch_seconds: float,
) -> float:
    """Stages 0 to 2 gather and reduce once a step, stage 3 gathers twice a micro-batch and reduces.

    Source: ZeRO, arXiv:1910.02054, section 7 (volumes).
    """
    if layout.num_shards == 1:
        return 0.0
    widths = state_widths(layout, workload.precision)
    tp, ep = layout.tensor_parallel_size, layout.expert_parallel_size
    parameters = sizes.stage_on_rank(layout.pipeline_parallel_size, stage, tp=tp, ep=ep)
    blocks = sizes.layers_per_stage(layout.pipeline_parallel_size)[stage] + 1
    group = rates.collective(layout.num_shards, tp)
    reduce = group.seconds(parameters.total * widths.gradient, blocks)
    gather = group.seconds(parameters.total * widths.parameter, blocks)
    sharded = layout.zero_stage == 3
    rounds = workload.num_micro_batches if sharded else 1
    communication = rounds * (reduce + (2 * gather if sharded else gather))
    hidden = rounds * micro_batch_seconds * efficiency.OVERLAP_SHARE
    return max(communication - hidden, efficiency.MIN_EXPOSED_SHARE * communication)


def _optimizer(sizes: ModelSizes, layout: Layout, rates: Hardware, stage: int) -> float:
    tp, ep = layout.tensor_parallel_size, layout.expert_parallel_size
    parameters = sizes.stage_on_rank(layout.pipeline_parallel_size, stage, tp=tp, ep=ep).total
    shards = layout.num_shards if layout.zero_stage > 0 else 1
    traffic = parameters / shards * efficiency.OPTIMIZER_TRAFFIC_BYTES
    return traffic / rates.memory_bytes_per_second
