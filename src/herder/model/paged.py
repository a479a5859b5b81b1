"""Keys and values in blocks that sequences share, and the attend that writes and reads them.

Layers that see equally far form a group with blocks of its own, so that those with a window can let
go of what they no longer see. Which sequence holds which block is the caller's business.

Legend: T new tokens, N query heads, K key-value heads, H head dim, V value head dim, B blocks,
S tokens of a block, P visible positions, X all block tables one after the other. Latent attention:
C latent dim, R rotated dim.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from herder.config.architecture import ArchitectureConfig, LatentAttention
from herder.model.attend import Attend, PackedAttend
from herder.model.attention_spec import AttentionSpec, shares
from herder.model.kernels import Kernels
from herder.model.linear import widen


def layer_groups(config: ArchitectureConfig) -> dict[AttentionSpec, list[int]]:
    """Layers by how far they see; of the key only that counts."""
    groups: dict[AttentionSpec, list[int]] = {}
    for index, layer in enumerate(config.layers):
        reach = AttentionSpec(layer.attention, layer.window or 0, scale=1.0)
        groups.setdefault(reach, []).append(index)
    return groups


class KvPages:
    """Keys and values, for each group [layers, B, S, K, H] each, allocated once.

    Latent attention keeps [layers, B, S, 1, C + R] alone: keys are each token's latent and its
    rotated key, values a view of the latent.

    Keys are stored rotated: they keep the angles they were written with, also where a longer text
    would give others (dynamic and longrope scaling), as in transformers.
    """

    def __init__(
        self,
        config: ArchitectureConfig,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        """`num_blocks`: of each of layer_groups(config)."""
        attention = config.attention
        self.block_size = block_size
        self.num_groups = len(num_blocks)
        self.device = torch.device(device)
        self.num_bytes = 0
        """Allocated bytes."""
        self.layers: dict[int, tuple[int, Tensor, Tensor]] = {}
        """Of each layer its group, keys_BSKH and values_BSKV."""
        latent = isinstance(attention, LatentAttention)
        heads = 1 if latent else attention.num_key_value_heads
        dim = attention.kv_lora_rank + attention.qk_rope_head_dim if latent else attention.head_dim
        value_dim = attention.kv_lora_rank if latent else dim
        for group, (count, layers) in enumerate(
            zip(num_blocks, layer_groups(config).values(), strict=True)
        ):
            shape = (len(layers), count, block_size, heads, dim)
            keys = torch.empty(shape, dtype=dtype, device=device)
            values = keys[..., :value_dim] if latent else torch.empty_like(keys)
            self.num_bytes += keys.nbytes * (1 if latent else 2)
            parts = zip(layers, keys, values, strict=True)
            self.layers |= {index: (group, k_BSKH, v_BSKV) for index, k_BSKH, v_BSKV in parts}


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence."""

    start: int
    """The first one's position; all before it are in the blocks."""
    num_tokens: int
    num_prompt: int
    """These stand in one document from the beginning, however they are cut; each later token comes
    when the document is as long as its position says."""
    tables: Sequence[array[int]]
    """For each group the blocks of positions 0 .. start + num_tokens, all of one length."""


class PagedAttend(Attend):
    """Attention of the new tokens of several sequences, which are written to their blocks first."""

    def __init__(self, pages: KvPages, spans: Sequence[Span]) -> None:
        """Spans that start at 0 come last: they read no block, and take fused attention."""
        self.spans = [span for span in spans if span.start]
        fresh = spans[len(self.spans) :]
        assert all(span.start == 0 for span in fresh), "a span at 0 stands before another"
        self.pages = pages
        self.packed = PackedAttend([span.num_tokens for span in fresh]) if fresh else None
        counts = [span.num_tokens for span in spans]
        rows = [0, *accumulate(counts)]
        offsets = [0, *accumulate(len(span.tables[0]) for span in spans)]
        self.num_paged_tokens = rows[len(self.spans)]
        self.longest = max(max(span.num_prompt, span.start + span.num_tokens) for span in spans)
        self.spans_Q4 = torch.tensor(
            [
                (row, span.num_tokens, span.start, offset)
                for row, span, offset in zip(rows, self.spans, offsets, strict=False)
            ]
        )
        """Of each paged span its first row, rows, first position and place in the tables."""
        each = torch.tensor(
            [
                (span.start - row, span.num_prompt, offset)
                for row, span, offset in zip(rows, spans, offsets, strict=False)
            ]
        )
        shift_T, prompt_T, offset_T = each.repeat_interleave(torch.tensor(counts), 0).unbind(1)
        places_T = torch.arange(rows[-1]) + shift_T
        self._context_T = torch.maximum(prompt_T, places_T + 1)
        self.positions_T = places_T.to(pages.device)
        self.tables: list[Tensor] = []
        """tables_X of each group."""
        self.slots: list[Tensor] = []
        """slots_T of each group: where its new tokens go, among B * S places."""
        size = pages.block_size
        for group in range(pages.num_groups):
            flat = array("q")
            for span in spans:
                flat.extend(span.tables[group])
            tables_X = torch.frombuffer(flat, dtype=torch.int64)
            blocks_T = tables_X[offset_T + places_T // size]
            self.slots.append((blocks_T * size + places_T % size).to(pages.device))
            self.tables.append(tables_X.to(pages.device))

    def context_T(self) -> Tensor:
        return self._context_T.to(self.pages.device)

    def layer(self, index: int) -> Attend:
        return _LayerPages(self, *self.pages.layers[index])


class _LayerPages(Attend):
    """One layer's part of the blocks, during one forward."""

    def __init__(
        self, whole: PagedAttend, group: int, keys_BSKH: Tensor, values_BSKV: Tensor
    ) -> None:
        self.whole = whole
        self.longest = whole.longest
        self.slots_T = whole.slots[group]
        self.tables_X = whole.tables[group]
        self.keys_BSKH = keys_BSKH
        self.values_BSKV = values_BSKV

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        self.keys_BSKH.flatten(0, 1).index_copy_(0, self.slots_T, k_TKH)
        self.values_BSKV.flatten(0, 1).index_copy_(0, self.slots_T, v_TKH)
        count, packed = self.whole.num_paged_tokens, self.whole.packed
        if packed is None:
            return self._over_blocks(q_TNH, spec, sinks_N)
        fresh_TNH = packed(q_TNH[count:], k_TKH[count:], v_TKH[count:], spec, sinks_N)
        if not count:
            return fresh_TNH
        return torch.cat((self._over_blocks(q_TNH[:count], spec, sinks_N), fresh_TNH))

    def latent(
        self,
        q_nope_TNP: Tensor,
        q_rope_TNR: Tensor,
        latent_TC: Tensor,
        k_rope_TR: Tensor,
        up: Callable[[], Tensor],
        spec: AttentionSpec,
    ) -> Tensor:
        """out_TNV over cached latents, which are one key-value head of C + R dims: what would
        expand them is applied to queries and outputs instead. Prefill from nothing expands.

        Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
        """
        key_T1H = torch.cat((latent_TC, k_rope_TR), -1)[:, None]
        self.keys_BSKH.flatten(0, 1).index_copy_(0, self.slots_T, key_T1H)
        count, packed = self.whole.num_paged_tokens, self.whole.packed
        parts = []
        if count:
            key_NPC, value_NVC = up().tensor_split((q_nope_TNP.shape[-1],), 1)
            q_TNC = _head_by_head(q_nope_TNP[:count], key_NPC)
            q_TNH = torch.cat((q_TNC, q_rope_TNR[:count]), -1)
            parts.append(_head_by_head(self._over_blocks(q_TNH, spec, None), value_NVC.mT))
        if packed is not None:
            q_nope_TNP, q_rope_TNR = q_nope_TNP[count:], q_rope_TNR[count:]
            latent_TC, k_rope_TR = latent_TC[count:], k_rope_TR[count:]
            parts.append(packed.latent(q_nope_TNP, q_rope_TNR, latent_TC, k_rope_TR, up, spec))
        return torch.cat(parts)

    def _over_blocks(self, q_TNH: Tensor, spec: AttentionSpec, sinks_N: Tensor | None) -> Tensor:
        whole, size = self.whole, self.whole.pages.block_size
        if Kernels.take(q_TNH):
            return Kernels.operators.attend_paged(
                q_TNH,
                self.keys_BSKH,
                self.values_BSKV,
                self.tables_X,
                whole.spans_Q4,
                spec.kind,
                spec.window,
                spec.scale,
                spec.logit_softcap,
                sinks_N,
            )
        outs = []
        for row, count, start, offset in whole.spans_Q4.tolist():
            first, end = spec.first_visible(start), start + count
            skipped = first // size
            blocks = self.tables_X[offset + skipped : offset + (end - 1) // size + 1]
            seen = slice(first - skipped * size, end - skipped * size)
            keys_KPH, values_KPV = (
                x[blocks].flatten(0, 1)[seen].transpose(0, 1)
                for x in (self.keys_BSKH, self.values_BSKV)
            )
            q = q_TNH[row : row + count]
            outs.append(
                attend_cached(q, keys_KPH, values_KPV, spec, sinks_N, start=start, first=first)
            )
        return torch.cat(outs)


def _head_by_head(x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
    """[T, N, O]: each head's part of x times a matrix of its own."""
    wide_x_TNI, wide_weight_NIO = widen(x_TNI, weight_NIO)
    return torch.bmm(wide_x_TNI.transpose(0, 1), wide_weight_NIO).transpose(0, 1).to(x_TNI.dtype)


def attend_cached(
    q_TNH: Tensor,
    keys_KPH: Tensor,
    values_KPV: Tensor,
    spec: AttentionSpec,
    sinks_N: Tensor | None = None,
    *,
    start: int,
    first: int,
) -> Tensor:
    """out_TNV of queries at positions start.. over keys at positions first.., softmax in fp32.

    Query heads that share a key-value head are rows of one product, so nothing is repeated.
    """
    num_tokens, _, head_dim = q_TNH.shape
    dtype, (num_kv_heads, num_keys, _) = q_TNH.dtype, keys_KPH.shape
    q_TNH, keys_KPH, values_KPV = widen(q_TNH, keys_KPH, values_KPV)
    q_KSH = q_TNH.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    logits_KSP = spec.logits(torch.bmm(q_KSH, keys_KPH.transpose(1, 2)))
    if num_tokens > 1:
        query = torch.arange(start, start + num_tokens, device=q_TNH.device)
        key = torch.arange(first, first + num_keys, device=q_TNH.device)
        hidden_TP = ~spec.allows(query[:, None], key)
        logits_KGTP = logits_KSP.unflatten(1, (-1, num_tokens))
        logits_KSP = logits_KGTP.masked_fill(hidden_TP, -torch.inf).flatten(1, 2)
    sinks_KS1 = None
    if sinks_N is not None:
        sinks_KS1 = sinks_N.view(num_kv_heads, -1, 1).repeat_interleave(num_tokens, 1)
    shares_KSP = shares(logits_KSP, sinks_KS1).to(values_KPV.dtype)
    out_KSV = torch.bmm(shares_KSP, values_KPV).to(dtype)
    return out_KSV.unflatten(1, (-1, num_tokens)).permute(2, 0, 1, 3).flatten(1, 2)
