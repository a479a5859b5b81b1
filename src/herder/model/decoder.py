"""The decoder: one forward for training, evaluation and serving, on packed token-major tensors.

Legend: T this rank's packed tokens, D hidden, V vocabulary.

It knows neither processes nor devices. What attention sees is the argument `attend`; what leaves
the model is the argument `readout`; how experts are reached is their module's `dispatch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from herder.config.architecture import ArchitectureConfig, LayerSpec
from herder.model.attend import Attend
from herder.model.attention import Attention, TokenPlaces
from herder.model.experts import Moe
from herder.model.latent_attention import LatentAttention
from herder.model.mlp import Mlp
from herder.model.norm import RmsNorm
from herder.model.readout import Head, Readout
from herder.model.rope import Rope
from herder.model.routing import LayerRouting


class Embedding(nn.Embedding):
    """Token vectors, times a constant for families that scale them."""

    def __init__(self, config: ArchitectureConfig, *, device: str, dtype: torch.dtype) -> None:
        super().__init__(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.axes = ("vocab", "embed")
        self.scale = config.embedding_scale

    def forward(self, input: Tensor) -> Tensor:
        """[T] ids to x_TD."""
        x_TD = super().forward(input)
        if self.scale == 1.0:
            return x_TD
        return x_TD * torch.tensor(self.scale, dtype=self.weight.dtype, device=x_TD.device)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual."""

    def __init__(
        self, config: ArchitectureConfig, layer: LayerSpec, *, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}

        def norm() -> RmsNorm:
            return RmsNorm(config.hidden_size, config.norm, axis="embed", **made)

        self.attention_norm = norm()
        latent = config.attention.kind == "latent"
        self.attention = (LatentAttention if latent else Attention)(config, layer, **made)
        self.attention_output_norm = norm() if config.branch_norm else nn.Identity()
        self.feed_forward_norm = norm()
        self.feed_forward = _feed_forward(config, layer, **made)
        self.feed_forward_output_norm = norm() if config.branch_norm else nn.Identity()

    def forward(
        self, x_TD: Tensor, places: TokenPlaces, attend: Attend, routing: LayerRouting | None
    ) -> Tensor:
        """x_TD. routing: what a routed layer is told and tells; a dense one does not look at it."""
        attended_TD = self.attention(self.attention_norm(x_TD), places, attend)
        x_TD = x_TD + self.attention_output_norm(attended_TD)
        normed_TD = self.feed_forward_norm(x_TD)
        if isinstance(self.feed_forward, Moe):
            fed_TD = self.feed_forward(normed_TD, routing)
        else:
            fed_TD = self.feed_forward(normed_TD)
        return x_TD + self.feed_forward_output_norm(fed_TD)


def _feed_forward(
    config: ArchitectureConfig, layer: LayerSpec, *, device: str, dtype: torch.dtype
) -> Mlp | Moe:
    if layer.feed_forward == "routed":
        assert config.moe is not None, "a routed layer without moe"
        return Moe(config.hidden_size, config.moe, device=device, dtype=dtype)
    assert config.mlp is not None, "a dense layer without mlp"
    return Mlp(config.hidden_size, config.mlp, device=device, dtype=dtype)


class Decoder(nn.Module):
    """The model. A pipeline stage is the same object with some layers deleted and embed, or norm
    and head, set to None."""

    def __init__(
        self, config: ArchitectureConfig, *, device: str = "meta", dtype: torch.dtype
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.config = config
        self.ropes = [Rope(rope) for rope in config.ropes]
        self.embed: Embedding | None = Embedding(config, **made)
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(config, layer, **made)
                for index, layer in enumerate(config.layers)
            }
        )
        self.norm: RmsNorm | None = RmsNorm(config.hidden_size, config.norm, axis="embed", **made)
        self.head: Head | None = Head(
            config.hidden_size, config.vocab_size, softcap=config.final_logit_softcap, **made
        )

    def forward(
        self,
        tokens_T: Tensor,
        *,
        positions_T: Tensor,
        attend: Attend,
        readout: Readout | None = None,
    ) -> Any:
        """logits_TV, or what readout makes of the normed hidden states and the head.

        tokens_T: int64 ids, or hidden_TD on a later pipeline stage. positions_T: int64, each
        token's place in its document. A stage without a head returns hidden_TD.
        """
        x_TD = tokens_T if self.embed is None else self.embed(tokens_T)
        places = self._places(positions_T, attend)
        for index, layer in self.layers.items():
            spec = self.config.layers[int(index)]
            place = places[spec.rope, spec.temperature]
            routing = None if attend.routing is None else attend.routing.layer(int(index))
            x_TD = layer(x_TD, place, attend.layer(int(index)), routing)
            if attend.routing is not None and routing is not None:
                attend.routing.keep(routing)
        if self.norm is None or self.head is None:
            return x_TD
        x_TD = self.norm(x_TD)
        return self.head(x_TD, readout)

    def _places(
        self, positions_T: Tensor, attend: Attend
    ) -> dict[tuple[int | None, bool], TokenPlaces]:
        """Rotation and temperature of each kind of layer there is."""
        longest = attend.longest
        reads_context = any(rope.depends_on_context(longest) for rope in self.ropes)
        context_T = attend.context_T() if reads_context else None
        rotaries = [
            rope.tables(positions_T, longest=longest, context_T=context_T) for rope in self.ropes
        ]
        temperature_T = self._temperature(positions_T)
        return {
            (rope, hot): TokenPlaces(
                None if rope is None else rotaries[rope], temperature_T if hot else None
            )
            for rope, hot in {(layer.rope, layer.temperature) for layer in self.config.layers}
        }

    def _temperature(self, positions_T: Tensor) -> Tensor | None:
        """1 + scale * ln(1 + floor((position + offset) / floor_tokens)) in fp32."""
        temperature = getattr(self.config.attention, "temperature", None)
        if temperature is None:
            return None
        places_T = positions_T.float() + temperature.position_offset
        steps_T = torch.floor(places_T / temperature.floor_tokens)
        return 1 + temperature.scale * torch.log1p(steps_T)
