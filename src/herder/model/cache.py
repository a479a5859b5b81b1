"""A preallocated key-value cache for one sequence, and the attend that writes and reads it.

Legend: T new tokens, N query heads, K key-value heads, H head dim, G query heads a key-value head,
P cached positions, S query rows of one key-value head (G * T).
"""

from __future__ import annotations

import torch
from torch import Tensor

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.errors import RequestError
from herder.model.attend import Attend, PackedAttend
from herder.model.attention_spec import AttentionSpec
from herder.model.kernels import Kernels


class KvCache:
    """Keys and values of one sequence, [layers, K, num_tokens, H] each, allocated once.

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
        assert isinstance(attention, GroupedQueryAttention), attention.kind
        shape = (config.num_layers, attention.num_key_value_heads, num_tokens, attention.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens there is room for."""
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return self.keys.nbytes + self.values.nbytes

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

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec) -> Tensor:
        start, end = self.whole.start, self.longest
        self.keys_KPH[:, start:end] = k_TKH.transpose(0, 1)
        self.values_KPH[:, start:end] = v_TKH.transpose(0, 1)
        prefill = self.whole.prefill
        if prefill is not None:
            return prefill(q_TNH, k_TKH, v_TKH, spec)
        first = first_visible(spec, start)
        keys, values = self.keys_KPH[:, first:end], self.values_KPH[:, first:end]
        return attend_cached(q_TNH, keys, values, spec, start=start, first=first)


def first_visible(spec: AttentionSpec, position: int) -> int:
    """The first key that a query at `position`, or any later one, may see."""
    if spec.kind == "sliding":
        return max(0, position - spec.window + 1)
    if spec.kind == "chunked":
        return position // spec.window * spec.window
    return 0


def attend_cached(
    q_TNH: Tensor,
    keys_KPH: Tensor,
    values_KPH: Tensor,
    spec: AttentionSpec,
    *,
    start: int,
    first: int,
) -> Tensor:
    """out_TNH of queries at positions start.. over keys at positions first.., softmax in fp32.

    Query heads that share a key-value head are rows of one product, so nothing is repeated.
    """
    num_tokens, _, head_dim = q_TNH.shape
    if num_tokens == 1 and Kernels.take(q_TNH):
        out_NH = Kernels.operators.attend_one(q_TNH[0], keys_KPH, values_KPH, spec.scale)
        return out_NH[None]
    num_kv_heads, num_keys, _ = keys_KPH.shape
    q_KSH = q_TNH.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores_KSP = torch.bmm(q_KSH, keys_KPH.transpose(1, 2)).float() * spec.scale
    if num_tokens > 1:
        query = torch.arange(start, start + num_tokens, device=q_TNH.device)
        key = torch.arange(first, first + num_keys, device=q_TNH.device)
        hidden_TP = ~spec.allows(query[:, None], key)
        scores_KGTP = scores_KSP.unflatten(1, (-1, num_tokens))
        scores_KSP = scores_KGTP.masked_fill(hidden_TP, -torch.inf).flatten(1, 2)
    out_KSH = torch.bmm(scores_KSP.softmax(-1).to(values_KPH.dtype), values_KPH)
    return out_KSH.unflatten(1, (-1, num_tokens)).permute(2, 0, 1, 3).flatten(1, 2)
