"""Grouped-query attention: projections, norms, rotation; the attend seam does the rest.

Legend: T this rank's tokens (gathered, under sequence parallelism), D hidden, N query heads,
K key-value heads, H head dim. Heads are split by view(T, -1, H): how many are local is the
caller's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    NormConfig,
)
from herder.model.attend import Attend
from herder.model.attention_spec import AttentionSpec
from herder.model.axes import Axis
from herder.model.linear import Linear
from herder.model.norm import RmsNorm, rms
from herder.model.rope import RotaryTables, rotate


class TokenPlaces:
    """Where a layer's tokens stand: their rotation and their query temperature, if any.

    A plain class on purpose, as RotaryTables.
    """

    def __init__(self, rotary: RotaryTables | None, temperature_T: Tensor | None) -> None:
        self.rotary = rotary
        self.temperature_T = temperature_T


class Sinks(nn.Module):
    """One learned logit a query head that attends to nothing. A leaf of its own, whose forward
    gives its parameter, so that whatever shards parameters can hook the place where it is read.
    Source: gpt-oss, arXiv:2508.10925, section 2.3."""

    def __init__(self, num_heads: int, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.axes = ("heads",)
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """[N]."""
        return self.weight


class Attention(nn.Module):
    """Grouped-query attention of one layer."""

    def __init__(
        self, config: ArchitectureConfig, layer: LayerSpec, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        attention = config.attention
        assert isinstance(attention, GroupedQueryAttention), attention.kind
        self.spec = AttentionSpec(
            layer.attention, layer.window or 0, attention.scale, attention.logit_softcap
        )
        self.head_dim = attention.head_dim
        self.clip_qkv = attention.clip_qkv
        self.weightless_norm_eps = config.norm.eps if attention.qk_norm == "weightless" else None
        self.norm_whole_projection = attention.qk_norm == "projection"
        query_dim = attention.num_attention_heads * attention.head_dim
        key_dim = attention.num_key_value_heads * attention.head_dim
        made = {"device": device, "dtype": dtype}

        def project(out_dim: int, axis: Axis) -> Linear:
            axes, bias = (axis, "embed"), attention.qkv_bias
            return Linear(config.hidden_size, out_dim, axes=axes, bias=bias, **made)

        self.query = project(query_dim, "heads")
        self.key, self.value = project(key_dim, "kv_heads"), project(key_dim, "kv_heads")
        self.output = Linear(
            query_dim,
            config.hidden_size,
            axes=("embed", "heads"),
            bias=attention.output_bias,
            **made,
        )
        widths = {"head": (attention.head_dim,) * 2, "projection": (query_dim, key_dim)}
        query_width, key_width = widths.get(attention.qk_norm, (None, None))
        whole = self.norm_whole_projection
        self.query_norm = _norm(query_width, "heads" if whole else "head", config.norm, **made)
        self.key_norm = _norm(key_width, "kv_heads" if whole else "head", config.norm, **made)
        self.sinks = Sinks(attention.num_attention_heads, **made) if attention.sinks else None

    def forward(self, x_TD: Tensor, places: TokenPlaces, attend: Attend) -> Tensor:
        q_TNH = self._heads(self.query(x_TD), self.query_norm)
        k_TKH = self._heads(self.key(x_TD), self.key_norm)
        v_TKH = self._heads(self.value(x_TD), None)
        if places.rotary is not None:
            q_TNH, k_TKH = rotate(q_TNH, places.rotary), rotate(k_TKH, places.rotary)
            if self.weightless_norm_eps is not None:
                eps = self.weightless_norm_eps
                q_TNH = rms(q_TNH.float(), eps).to(q_TNH.dtype)
                k_TKH = rms(k_TKH.float(), eps).to(k_TKH.dtype)
        if places.temperature_T is not None:
            q_TNH = (q_TNH * places.temperature_T[:, None, None]).to(q_TNH.dtype)
        sinks_N = None if self.sinks is None else self.sinks()
        out_TNH = attend(q_TNH, k_TKH, v_TKH, self.spec, sinks_N)
        return self.output(out_TNH.flatten(1))

    def _heads(self, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """[T, heads, H] of a projection, normed over it whole or each head apart."""
        if norm is not None and self.norm_whole_projection:
            x = norm(x)
        if self.clip_qkv is not None:
            x = x.clamp(-self.clip_qkv, self.clip_qkv)
        x = x.view(x.shape[0], -1, self.head_dim)
        return norm(x) if norm is not None and not self.norm_whole_projection else x


def _norm(
    width: int | None, axis: Axis, config: NormConfig, *, device: str, dtype: torch.dtype
) -> RmsNorm | None:
    if width is None:
        return None
    return RmsNorm(width, config, axis=axis, device=device, dtype=dtype)
