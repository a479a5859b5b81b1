"""Bytes on a device in training: state by the 16N rule, activations, logits, buffers, overhead.

Owns which bytes count and on which pipeline stage they peak; decides nothing. `state` is the rule
with even shares; `largest_rank_state` is what tensors add up to (allocated.py): embedding and head
on the ends, uneven stages and shards, key-value heads copied where tensor parallelism exceeds them,
the dtype that gradients are reduced in. Activations are the tensors
that autograd saves in one layer of model/: eager PyTorch with fused attention (scores are never
stored), experts chosen evenly. Tensor parallelism comes with sequence parallelism, so the residual
stream is split; the gathered input of a column-parallel product is kept whole. Source for the
method: Korthikanti et al., arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LayerSpec
from herder.config.record import Record
from herder.config.run import GpuConfig
from herder.plan.candidate import Candidate, Request, StateWidths
from herder.plan.layout import Layout
from herder.plan.stages import RankParameters
from herder.units import GB, GIB

GPU_MEMORY_SHARE = 0.92
"""How much of a GPU's nominal memory a plan may fill: the rest is the allocator's fragmentation."""
CPU_MEMORY_SHARE = 0.7
"""Of a CPU's memory, which the operating system, page cache and other processes share."""
ONE_RANK_OVERHEAD_BYTES = round(0.25 * GIB)
"""Device context and workspaces. Source: vLLM logs on H100 at TP 1, llm-d-planner PR 205."""
MANY_RANKS_OVERHEAD_BYTES = round(2.1 * GIB)
"""The same with the collectives' buffers: at TP 2 and up in those logs."""
CPU_OVERHEAD_BYTES = round(0.5 * GB)
"""Resident size of a process that has imported torch and read a tokenizer."""
BLOCKS_IN_FLIGHT = 2
"""Blocks whose parameters are gathered or gradients reduced at once: this one and its neighbour."""
GATED_TENSORS = 2
"""Kept of down(act(gate) * up): gate and up. Their product is made again."""
GATED_GRADIENT_TENSORS = 6
"""Alive at once in its backward pass: act(gate), the product, and gradients of product, act(gate),
gate and up."""
ROW_TENSORS = 2
"""Copies of a token for each of its experts that are kept: what goes in, and what comes out."""
ROW_GRADIENT_TENSORS = 4
"""Alive at once of their gradients, in bf16: those of both, and one of them in fp32."""
ROUTER_TENSORS = 3
"""Numbers an expert that are kept in fp32: its share, and twice its logit for losses and events.
The router also keeps its input in fp32."""
LOGIT_BYTES = 10
"""Of one logit while its chunk of the loss is computed: bf16, an fp32 copy, an fp32 gradient."""
FP32_LOGIT_BYTES = 8


class MemoryGb(Record):
    """GB (1e9 bytes) on the fullest device, part by part."""

    state: float
    """Parameters, gradients and optimizer state by the 16N rule, even shares N / (TP PP)."""
    largest_rank_state: float
    """What the rank that holds most allocates for them."""
    activations: float
    logits: float
    buffers: float
    """Units of parameters being gathered and of gradients being reduced; of whole state, the copies
    that autocast keeps, or buckets of gradients."""
    overhead: float
    """Device context, libraries, communicators."""
    total: float
    """largest_rank_state and everything below it, on the stage where the sum peaks."""
    budget: float
    """What a plan may fill of the device."""
    device: float


def state_bytes(parameters: RankParameters, layout: Layout, widths: StateWidths) -> float:
    """The 16N rule: what a rank keeps of `parameters` after ZeRO shares out its part.

    Over P ranks with bf16 parameters: stage 0 16N, stage 1 12N/P + 4N, stage 2 14N/P + 2N, stage 3
    16N/P. Experts are shared out over the P / EP ranks that hold the same ones.
    """
    shared = shared_out(parameters, layout)
    stages = ((3, widths.parameter), (2, widths.gradient), (1, widths.optimizer))
    return sum(w * (shared if layout.zero_stage >= s else parameters.total) for s, w in stages)


def shared_out(parameters: RankParameters, layout: Layout) -> float:
    """A rank's share of parameters where those that hold the same ones share them out."""
    expert_shards = layout.num_shards // layout.expert_parallel_size
    return parameters.dense / layout.num_shards + parameters.experts / expert_shards


def even_state_bytes(request: Request, layout: Layout, parameters: RankParameters) -> float:
    """The rule with even shares: N / (TP PP), experts also over EP."""
    ways = layout.tensor_parallel_size * layout.pipeline_parallel_size
    experts = parameters.experts / ways / layout.expert_parallel_size
    share = RankParameters(parameters.dense / ways, experts)
    return state_bytes(share, layout, request.state_widths(layout))


def _budget_bytes(gpu: GpuConfig) -> float:
    """What a training plan may fill of one device."""
    share = CPU_MEMORY_SHARE if gpu.kind == "cpu" else GPU_MEMORY_SHARE
    return gpu.memory_gb * GB * share


def cannot_fit(request: Request, layout: Layout) -> bool:
    """Whether state alone exceeds the budget: known before any micro-batch is looked at."""
    return even_state_bytes(request, layout, request.sizes.whole) > _budget_bytes(request.gpu)


def training_memory(candidate: Candidate) -> MemoryGb:
    """The parts on the device that fills most, over all pipeline stages."""
    request, layout = candidate.request, candidate.layout
    gpu, sizes = request.gpu, request.sizes
    overhead = CPU_OVERHEAD_BYTES
    if gpu.kind == "gpu":
        overhead = ONE_RANK_OVERHEAD_BYTES if layout.num_ranks == 1 else MANY_RANKS_OVERHEAD_BYTES
    of_layer = {
        layer: (
            layer_bytes_per_token(candidate, layer),
            _gradient_bytes_per_token(candidate, layer),
        )
        for layer in sizes.kinds
    }
    stages = [_stage_bytes(candidate, stage, of_layer) for stage in candidate.distinct_stages()]
    fullest = max(stages, key=sum)
    return MemoryGb(
        state=even_state_bytes(request, layout, sizes.whole) / GB,
        largest_rank_state=max(state for state, *_ in stages) / GB,
        activations=fullest[1] / GB,
        logits=fullest[2] / GB,
        buffers=fullest[3] / GB,
        overhead=overhead / GB,
        total=(sum(fullest) + overhead) / GB,
        budget=_budget_bytes(gpu) / GB,
        device=gpu.memory_gb,
    )


_LayerBytes = Mapping[LayerSpec, tuple[float, float]]
"""Of a token in each kind of layer: what is saved, and gradients alive at once."""


def _stage_bytes(
    candidate: Candidate, stage: int, of_layer: _LayerBytes
) -> tuple[float, float, float, float]:
    """State, activations, logits and buffers of one stage's rank."""
    layout, parameters = candidate.layout, candidate.stage_parameters(stage)
    logits = 0.0
    if stage == layout.pipeline_parallel_size - 1:
        vocab_size = candidate.request.sizes.architecture.vocab_size
        chunk_tokens = min(candidate.request.train.loss_chunk_tokens, candidate.local_tokens)
        each = LOGIT_BYTES if candidate.compute_bytes == 2 else FP32_LOGIT_BYTES
        logits = chunk_tokens * vocab_size / layout.tensor_parallel_size * each
    return (
        candidate.stage_state(stage).total,
        _activation_bytes(candidate, stage, of_layer),
        logits,
        _buffer_bytes(candidate, parameters) + _arrival_bytes(candidate, stage),
    )


def _activation_bytes(candidate: Candidate, stage: int, of_layer: _LayerBytes) -> float:
    """Of the micro-batches in flight, and one layer at work."""
    layout, hidden = candidate.layout, candidate.request.sizes.architecture.hidden_size
    stages, layers = layout.pipeline_parallel_size, candidate.stage_layers(stage)
    in_flight = candidate.micro_batches_in_flight(stage)
    at_work = max(of_layer[layer][1] for layer in layers)
    if candidate.recompute == "full":
        residual = hidden * candidate.residual_bytes / layout.tensor_parallel_size
        kept = residual * layers.total()
        at_work += max(of_layer[layer][0] for layer in layers)
    else:
        kept = sum(of_layer[layer][0] * times for layer, times in layers.items())
    ends = 0.0
    if stage == stages - 1:
        ends = 2 * hidden * (candidate.residual_bytes + candidate.compute_bytes)
    return candidate.local_tokens * (kept * in_flight + at_work + ends)


def _buffer_bytes(candidate: Candidate, parameters: RankParameters) -> float:
    """What exists beside state and activations while a step runs.

    Whole state: autocast's copies until the backward pass has used them, or, at its end, the flat
    buckets in which gradients are summed. Sharded state: units on their way.
    """
    layout, sizes = candidate.layout, candidate.request.sizes
    if layout.zero_stage == 0:
        copies = 2 * parameters.total if candidate.compute_bytes == 2 else 0.0
        buckets = 4 * parameters.total if layout.num_shards > 1 else 0.0
        return max(copies, buckets)
    tp = layout.tensor_parallel_size
    block = sizes.largest_layer_on_rank(tp=tp, ep=layout.expert_parallel_size)
    reduced = BLOCKS_IN_FLIGHT * block * candidate.gradient_bytes
    if layout.zero_stage < 3:
        return reduced
    gathered = max(BLOCKS_IN_FLIGHT * block, block + sizes.largest_end_on_rank(tp=tp))
    return reduced + gathered * candidate.compute_bytes


def _arrival_bytes(candidate: Candidate, stage: int) -> float:
    """Where hidden states arrive from the stage before and gradients from the one behind: torch has
    a place for each micro-batch of a step."""
    ranks, chunks = candidate.layout.pipeline_parallel_size, candidate.chunks
    arrivals = 2 * chunks - (stage == 0) - (stage == ranks - 1)
    hidden = candidate.request.sizes.architecture.hidden_size * candidate.residual_bytes
    each = candidate.local_tokens * hidden / candidate.layout.tensor_parallel_size
    return arrivals * candidate.num_micro_batches * each


def layer_bytes_per_token(candidate: Candidate, layer: LayerSpec) -> float:
    """Activations that one layer saves on one rank without recompute."""
    architecture, tp = candidate.request.sizes.architecture, candidate.layout.tensor_parallel_size
    hidden, compute = architecture.hidden_size, candidate.compute_bytes
    residual = 2 * hidden * candidate.residual_bytes / tp
    if architecture.branch_norm:
        residual += 2 * hidden * compute / tp
    in_fp32 = architecture.attention.num_attention_heads / tp
    saved = hidden + _attention_elements(architecture, tp)
    saved += GATED_TENSORS * _active_width(architecture, layer) / tp
    moe = architecture.moe
    if layer.feed_forward == "dense" or moe is None:
        return residual + compute * (saved + hidden) + 4 * in_fp32
    saved += ROW_TENSORS * moe.num_experts_per_token * hidden
    in_fp32 += hidden + ROUTER_TENSORS * moe.num_experts
    shared_width = moe.shared_expert_intermediate_size
    if compute < 4 and (shared_width is not None or moe.weight_on_input):
        saved += hidden
    if shared_width is not None:
        saved += GATED_TENSORS * shared_width / tp + hidden * moe.shared_expert_gate
    return residual + compute * saved + 4 * in_fp32


def _gradient_bytes_per_token(candidate: Candidate, layer: LayerSpec) -> float:
    """Gradients alive at once in the backward pass of a layer's feed-forward."""
    architecture, tp = candidate.request.sizes.architecture, candidate.layout.tensor_parallel_size
    moe, hidden = architecture.moe, architecture.hidden_size
    elements = GATED_GRADIENT_TENSORS * _active_width(architecture, layer) / tp + 2 * hidden
    if layer.feed_forward == "routed" and moe is not None:
        elements += ROW_GRADIENT_TENSORS * moe.num_experts_per_token * hidden
    return candidate.compute_bytes * elements


def _active_width(architecture: ArchitectureConfig, layer: LayerSpec) -> int:
    """Width of the gated product that one token meets, its experts' side by side."""
    if layer.feed_forward == "dense":
        assert architecture.mlp is not None, "a dense layer without mlp passed its check"
        return architecture.mlp.intermediate_size
    assert architecture.moe is not None, "a routed layer without moe passed its check"
    return architecture.moe.num_experts_per_token * architecture.moe.expert_intermediate_size


def _attention_elements(architecture: ArchitectureConfig, tp: int) -> float:
    """Queries, keys, values as attention takes them, its output, and what norms take.

    Latent attention is expanded: its values are kept with the keys they were expanded beside.
    """
    attention = architecture.attention
    if isinstance(attention, GroupedQueryAttention):
        query = attention.num_attention_heads * attention.head_dim / tp
        keys_values = 2 * max(1.0, attention.num_key_value_heads / tp) * attention.head_dim
        normed = query + keys_values / 2 if attention.qk_norm != "none" else 0.0
        return 2 * query + keys_values + normed
    latents = 2 * (attention.q_lora_rank or 0) + 2 * attention.kv_lora_rank
    query_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    head = 2 * query_dim + attention.qk_nope_head_dim + 2 * attention.v_head_dim
    return latents + attention.qk_rope_head_dim + attention.num_attention_heads / tp * head
