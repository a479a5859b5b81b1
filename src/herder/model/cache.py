"""A preallocated key-value cache for one sequence, and the attend that writes and reads it.

Legend: T new tokens, N query heads, K key-value heads, H head dim, G query heads a key-value head,
P cached positions, S query rows of one key-value head (G * T). Latent attention: C latent dim,
R rotated dim, V value head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from herder.config.architecture import ArchitectureConfig, LatentAttention
from herder.errors import RequestError
from herder.model.attend import Attend, PackedAttend
from herder.model.attention_spec import AttentionSpec, shares
from herder.model.kernels import Kernels
from herder.model.linear import widen


class KvCache:
    """Keys and values of one sequence, [layers, K, num_tokens, H] each, allocated once.

    Latent attention keeps [layers, 1, num_tokens, C + R] alone: keys are each token's latent and
    its rotated key, values a view of the latent.

    Keys are stored rotated: they keep the angles they were written with, also where a longer text
    would give others (dynamic and longrope scaling), as in transformers.
    """

    def __init__(
        self,
        config: ArchitectureConfig,
        *,
        num_tokens: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        attention = config.attention
        latent = isinstance(attention, LatentAttention)
        num_heads = 1 if latent else attention.num_key_value_heads
        key_dim = (
            attention.kv_lora_rank + attention.qk_rope_head_dim if latent else attention.head_dim
        )
        shape = (config.num_layers, num_heads, num_tokens, key_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = (
            self.keys[..., : attention.kv_lora_rank] if latent else torch.empty_like(self.keys)
        )
        self.num_bytes = self.keys.nbytes * (1 if latent else 2)
        """Allocated bytes."""
        self.length = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens there is room for."""
        return self.keys.shape[2]

    def attend(self, num_new_tokens: int) -> Attend:
        """The attend of one forward over the next num_new_tokens tokens, which it writes.

        Raises RequestError where they do not fit.
        """
        end = self.length + num_new_tokens
        if end > self.num_tokens:
            raise RequestError(
                f"{end} tokens do not fit a key-value cache of {self.num_tokens} tokens"
            )
        return CachedAttend(self, num_new_tokens)

    def positions_T(self, num_new_tokens: int) -> Tensor:
        """The positions of the next num_new_tokens tokens."""
        return torch.arange(self.length, self.length + num_new_tokens, device=self.keys.device)

    def advance(self, num_new_tokens: int) -> None:
        """Counts tokens that a finished forward has written."""
        self.length += num_new_tokens

    def truncate(self, length: int) -> None:
        """Forgets what lies past the first `length` tokens; 0 forgets all."""
        assert 0 <= length <= self.length, f"length={length} of {self.length}"
        self.length = length


class CachedAttend(Attend):
    """Attention of new tokens over a cache that they are written to first."""

    def __init__(self, cache: KvCache, num_new_tokens: int) -> None:
        self.cache = cache
        self.start = cache.length
        self.longest = cache.length + num_new_tokens
        self.num_new_tokens = num_new_tokens
        self.prefill = PackedAttend([num_new_tokens]) if self.start == 0 else None
        """Plain attention among the new tokens, where nothing is cached before them."""

    def context_T(self) -> Tensor:
        return torch.full((self.num_new_tokens,), self.longest, device=self.cache.keys.device)

    def layer(self, index: int) -> Attend:
        return _LayerCache(self, self.cache.keys[index], self.cache.values[index])


class _LayerCache(Attend):
    """One layer's part of the cache, during one forward."""

    def __init__(self, whole: CachedAttend, keys_KPH: Tensor, values_KPH: Tensor) -> None:
        self.whole = whole
        self.longest = whole.longest
        self.keys_KPH = keys_KPH
        self.values_KPH = values_KPH

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        start, end = self.whole.start, self.longest
        self.keys_KPH[:, start:end] = k_TKH.transpose(0, 1)
        self.values_KPH[:, start:end] = v_TKH.transpose(0, 1)
        prefill = self.whole.prefill
        if prefill is not None:
            return prefill(q_TNH, k_TKH, v_TKH, spec, sinks_N)
        return self._over_cached(q_TNH, spec, sinks_N)

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
        start, end = self.whole.start, self.longest
        self.keys_KPH[0, start:end] = torch.cat((latent_TC, k_rope_TR), -1)
        prefill = self.whole.prefill
        if prefill is not None:
            return prefill.latent(q_nope_TNP, q_rope_TNR, latent_TC, k_rope_TR, up, spec)
        key_NPC, value_NVC = up().tensor_split((q_nope_TNP.shape[-1],), 1)
        q_TNC = _head_by_head(q_nope_TNP, key_NPC)
        out_TNC = self._over_cached(torch.cat((q_TNC, q_rope_TNR), -1), spec)
        return _head_by_head(out_TNC, value_NVC.mT)

    def _over_cached(
        self, q_TNH: Tensor, spec: AttentionSpec, sinks_N: Tensor | None = None
    ) -> Tensor:
        start, end = self.whole.start, self.longest
        first = spec.first_visible(start)
        keys, values = self.keys_KPH[:, first:end], self.values_KPH[:, first:end]
        return attend_cached(q_TNH, keys, values, spec, sinks_N, start=start, first=first)


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
    plain = spec.logit_softcap is None and sinks_N is None and keys_KPH.shape == values_KPV.shape
    if num_tokens == 1 and plain and Kernels.take(q_TNH):
        out_NH = Kernels.operators.attend_one(q_TNH[0], keys_KPH, values_KPV, spec.scale)
        return out_NH[None]
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
