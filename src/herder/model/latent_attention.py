"""Multi-head latent attention: projections, latent norms, rotation; the attend seam does the rest.

Keys and values come from one small latent a token, which is what a cache keeps. Whether it is
expanded to heads or the expansion absorbed into queries and outputs is the attend's choice.

Legend: T this rank's tokens, D hidden, N heads, P unrotated and R rotated head dim, V value head
dim, C latent dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from herder.config.architecture import ArchitectureConfig, LayerSpec, NormConfig
from herder.config.architecture import LatentAttention as LatentAttentionConfig
from herder.model.attend import Attend
from herder.model.attention import TokenPlaces
from herder.model.attention_spec import AttentionSpec
from herder.model.linear import Linear
from herder.model.norm import RmsNorm
from herder.model.rope import rotate


class KeyValueUp(nn.Module):
    """What expands a latent to every head's unrotated key and value: a leaf whose forward gives its
    parameter, head by head, for an attend to expand with or to absorb."""

    def __init__(
        self, attention: LatentAttentionConfig, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.axes = ("heads", "latent")
        self.width = attention.qk_nope_head_dim + attention.v_head_dim
        shape = (attention.num_attention_heads * self.width, attention.kv_lora_rank)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """[N, P + V, C]."""
        return self.weight.unflatten(0, (-1, self.width))


class LatentAttention(nn.Module):
    """Latent attention of one layer. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    def __init__(
        self, config: ArchitectureConfig, layer: LayerSpec, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        attention = config.attention
        assert isinstance(attention, LatentAttentionConfig), attention.kind
        self.spec = AttentionSpec(layer.attention, layer.window or 0, attention.scale)
        self.query_dims = (attention.qk_nope_head_dim, attention.qk_rope_head_dim)
        self.latent_dims = (attention.kv_lora_rank, attention.qk_rope_head_dim)
        hidden, heads, bias = config.hidden_size, attention.num_attention_heads, attention.bias
        query_dim = heads * sum(self.query_dims)
        made = {"device": device, "dtype": dtype}

        def latent_norm(dim: int) -> RmsNorm:
            eps = attention.latent_norm_eps
            return RmsNorm(dim, NormConfig(eps=eps), axis="latent", **made)

        self.query_path = ("query",)
        """The names of the modules that make queries, in order."""
        if attention.q_lora_rank is None:
            self.query = Linear(hidden, query_dim, axes=("heads", "embed"), bias=False, **made)
        else:
            self.query_path = ("query_down", "query_latent_norm", "query_up")
            rank = attention.q_lora_rank
            self.query_down = Linear(hidden, rank, axes=("latent", "embed"), bias=bias, **made)
            self.query_latent_norm = latent_norm(rank)
            self.query_up = Linear(rank, query_dim, axes=("heads", "latent"), bias=False, **made)
        self.key_value_down = Linear(
            hidden, sum(self.latent_dims), axes=("latent", "embed"), bias=bias, **made
        )
        self.key_value_latent_norm = latent_norm(attention.kv_lora_rank)
        self.key_value_up = KeyValueUp(attention, **made)
        self.output = Linear(
            heads * attention.v_head_dim, hidden, axes=("embed", "heads"), bias=bias, **made
        )

    def forward(self, x_TD: Tensor, places: TokenPlaces, attend: Attend) -> Tensor:
        q = x_TD
        for name in self.query_path:
            q = getattr(self, name)(q)
        q_TNH = q.unflatten(1, (-1, sum(self.query_dims)))
        q_nope_TNP, q_rope_TNR = q_TNH.split(self.query_dims, -1)
        latent_TC, k_rope_TR = self.key_value_down(x_TD).split(self.latent_dims, -1)
        latent_TC = self.key_value_latent_norm(latent_TC)
        if places.rotary is not None:
            q_rope_TNR = rotate(q_rope_TNR, places.rotary)
            k_rope_TR = rotate(k_rope_TR[:, None], places.rotary)[:, 0]
        out_TNV = attend.latent(
            q_nope_TNP, q_rope_TNR, latent_TC, k_rope_TR, self.key_value_up, self.spec
        )
        return self.output(out_TNV.flatten(1))
