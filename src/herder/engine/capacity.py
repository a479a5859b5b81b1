"""How many blocks the key-value cache has: what a budget of bytes pays for, and what can be used.

A group of layers with a window holds a bounded number of blocks a sequence, so it gets no more than
the sequences that run at once can hold; the other groups get what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import psutil
import torch

from herder.config.architecture import ArchitectureConfig
from herder.config.run import EngineConfig
from herder.engine.blocks import BlockGroup
from herder.errors import ConfigError
from herder.model.paged import layer_groups
from herder.plan.flops import key_value_elements
from herder.plan.serving import DEFAULT_UTILIZATION
from herder.units import GB

CPU_SHARE = 0.25
"""Of the memory that is free, where no size is asked for: the rest is other programs' too."""
CPU_CAP_BYTES = 4 * GB
"""And no more than this."""


def default_budget_bytes(device: torch.device) -> float:
    """What the cache may take when the weights are already there."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free - (1 - DEFAULT_UTILIZATION) * total
    return min(CPU_CAP_BYTES, CPU_SHARE * psutil.virtual_memory().available)


def block_groups(
    architecture: ArchitectureConfig,
    config: EngineConfig,
    *,
    window_tokens: int,
    max_num_batched_tokens: int,
    bytes_per_element: int,
    device: torch.device,
) -> list[BlockGroup]:
    """The groups of layer_groups(architecture), with their blocks.

    Without config.kv_cache_gb at least one whole window has room, whatever it takes. Raises
    ConfigError where kv_cache_gb is too small for that.
    """
    size = config.block_size
    whole = -(-window_tokens // size)
    chunk = min(max_num_batched_tokens, window_tokens)
    layers = layer_groups(architecture)
    most_held = [
        min(whole, -(-(r.window + chunk) // size) + 1) if r.window else whole for r in layers
    ]
    block_bytes = key_value_elements(architecture) * size * bytes_per_element

    def counts(num_blocks: int) -> Iterator[int]:
        return (min(num_blocks, config.max_num_seqs * most) for most in most_held)

    def num_bytes(num_blocks: int) -> float:
        pairs = zip(layers.values(), counts(num_blocks), strict=True)
        return sum(len(group) * count * block_bytes for group, count in pairs)

    if config.kv_cache_gb is None:
        budget = max(default_budget_bytes(device), num_bytes(whole))
    else:
        budget = config.kv_cache_gb * GB
    sizes = range(config.max_num_seqs * whole + 1)
    num_blocks = bisect_right(sizes, budget, key=num_bytes) - 1
    if num_blocks < whole:
        raise ConfigError(
            f"kv_cache_gb={config.kv_cache_gb} holds {num_blocks * size:,} tokens, but one "
            f"sequence may have {window_tokens:,}. Give --kv-cache-gb {num_bytes(whole) / GB:.3g} "
            "or more, or a shorter --max-model-len."
        )
    return [
        BlockGroup(reach.first_visible, count, most)
        for reach, count, most in zip(layers, counts(num_blocks), most_held, strict=True)
    ]
