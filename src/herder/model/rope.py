"""Rotary position embedding: frequencies by scaling kind, tables that grow on demand, the rotation.

Legend: T tokens, N heads, H head dim, R rotated pairs (rotary_dim / 2). Tables are fp32 and plain
attributes, not buffers: `.to(bfloat16)` must not reach them, for positions past 256 would collide.

Two kinds depend on how long the text is once it passes the original window, as in transformers:
dynamic stretches theta by the length of the token's document at the time of the forward, longrope
takes its long factors. Other documents of the same forward play no part, and keys already cached
keep the angles they were written with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from herder.config.architecture import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from herder.model.autograd import Function
from herder.model.kernels import Kernels

SMALLEST_TABLE = 256
"""Positions computed at first; a table doubles whenever a position is past its end."""


class RotaryTables:
    """cos_TR and sin_TR of one forward, for one RopeConfig.

    A plain class on purpose: FSDP casts tensors it finds in tuples, dicts and dataclasses.
    """

    def __init__(self, cos_TR: Tensor, sin_TR: Tensor, *, interleaved: bool) -> None:
        self.cos_TR = cos_TR
        self.sin_TR = sin_TR
        self.interleaved = interleaved


class Rope:
    """The growing cos and sin table of one RopeConfig, on whatever device positions are."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._cos_PR = torch.empty(0, config.rotary_dim // 2)
        self._sin_PR = torch.empty(0, config.rotary_dim // 2)

    def depends_on_context(self, longest: int) -> bool:
        """Whether angles need to know how long each token's document is, not positions alone."""
        scaling = self.config.scaling
        if isinstance(scaling, DynamicScaling | LongRopeScaling):
            return longest > scaling.original_max_position_embeddings
        return False

    def tables(
        self, positions_T: Tensor, *, longest: int, context_T: Tensor | None
    ) -> RotaryTables:
        """Angles of tokens at positions_T.

        longest: one more than the largest of positions_T, as a host number. context_T: how many
        positions each token's document has so far; read only where depends_on_context(longest).
        """
        if self.depends_on_context(longest):
            assert context_T is not None, "this rope needs the length of each token's document"
            cos_TR, sin_TR = self._evaluate(positions_T, self._context_frequencies(context_T))
        else:
            self._grow(longest, positions_T.device)
            cos_TR, sin_TR = self._cos_PR[positions_T], self._sin_PR[positions_T]
        return RotaryTables(cos_TR, sin_TR, interleaved=self.config.interleaved)

    def _evaluate(self, positions_P: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles_PR = positions_P[:, None].float() * frequencies
        factor = attention_factor(self.config)
        return angles_PR.cos() * factor, angles_PR.sin() * factor

    def _grow(self, longest: int, device: torch.device) -> None:
        if longest <= self._cos_PR.shape[0] and device == self._cos_PR.device:
            return
        num_positions = SMALLEST_TABLE
        while num_positions < longest:
            num_positions *= 2
        frequencies_R = inverse_frequencies(self.config).to(device)
        positions_P = torch.arange(num_positions, device=device)
        self._cos_PR, self._sin_PR = self._evaluate(positions_P, frequencies_R)

    def _context_frequencies(self, context_T: Tensor) -> Tensor:
        """inv_freq_TR for tokens whose documents hold context_T positions."""
        scaling = self.config.scaling
        if isinstance(scaling, LongRopeScaling):
            is_long_T1 = (context_T > scaling.original_max_position_embeddings)[:, None]
            long_R = inverse_frequencies(self.config, use_long_factors=True)
            short_R = inverse_frequencies(self.config)
            return torch.where(
                is_long_T1, long_R.to(context_T.device), short_R.to(context_T.device)
            )
        assert isinstance(scaling, DynamicScaling), scaling.kind
        return _dynamic_frequencies(self.config, scaling, context_T)


def inverse_frequencies(config: RopeConfig, *, use_long_factors: bool = False) -> Tensor:
    """inv_freq_R in fp32, radians a position; for dynamic scaling those of the original window."""
    d = config.rotary_dim
    exponent_R = torch.arange(0, d, 2, dtype=torch.int64).float() / d
    plain_R = 1.0 / (config.theta**exponent_R)
    match config.scaling:
        case LinearScaling(factor=factor):
            return plain_R / factor
        case YarnScaling():
            return _yarn_frequencies(config, config.scaling, plain_R)
        case Llama3Scaling():
            return _llama3_frequencies(config.scaling, plain_R)
        case LongRopeScaling() as scaling:
            divisor = scaling.long_factor if use_long_factors else scaling.short_factor
            return plain_R / torch.tensor(divisor, dtype=torch.float32)
        case _:
            return plain_R


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    return getattr(config.scaling, "attention_factor", 1.0)


def _dynamic_frequencies(config: RopeConfig, scaling: DynamicScaling, context_T: Tensor) -> Tensor:
    """inv_freq_TR with theta stretched by each document's length; unscaled within the window.

    Source: the dynamic NTK of transformers' modeling_rope_utils, after its 2023 proposal.
    """
    d, window = config.rotary_dim, scaling.original_max_position_embeddings
    stretch_T = scaling.factor * context_T.clamp(min=window).float() / window - (scaling.factor - 1)
    theta_T = config.theta * stretch_T ** (d / (d - 2))
    exponent_R = torch.arange(0, d, 2, device=context_T.device).float() / d
    return 1.0 / theta_T[:, None] ** exponent_R


def _yarn_frequencies(config: RopeConfig, scaling: YarnScaling, plain_R: Tensor) -> Tensor:
    """Interpolated below beta_slow rotations, untouched above beta_fast. arXiv:2309.00071, 3.2."""
    d = config.rotary_dim

    def dim_of(num_rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return d * math.log(turns) / (2 * math.log(config.theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    ramp_R = ((torch.arange(d // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain_R / scaling.factor * ramp_R + plain_R * (1 - ramp_R)


def _llama3_frequencies(scaling: Llama3Scaling, plain_R: Tensor) -> Tensor:
    """Long waves divided by the factor, short ones kept, a ramp between. Llama 3.1's apply_scaling.

    With equal low and high factors (Llama 4 Instruct) the ramp is 0/0 and never selected.
    """
    window = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_R = 2 * math.pi / plain_R
    smooth_R = (window / wavelength_R - low) / (high - low if high != low else 1.0)
    between_R = (1 - smooth_R) * plain_R / scaling.factor + smooth_R * plain_R
    scaled_R = torch.where(wavelength_R > window / low, plain_R / scaling.factor, between_R)
    return torch.where(wavelength_R < window / high, plain_R, scaled_R)


def rotate(x_TNH: Tensor, tables: RotaryTables) -> Tensor:
    """x with its first 2R dims rotated by each token's angles; cos and sin in x's dtype."""
    if torch.is_grad_enabled():
        return _Rotation.apply(x_TNH, tables.cos_TR, tables.sin_TR, tables.interleaved)
    if Kernels.take(x_TNH):
        return Kernels.operators.rotate(x_TNH, tables.cos_TR, tables.sin_TR, tables.interleaved)
    return _turned(x_TNH, tables.cos_TR, tables.sin_TR, interleaved=tables.interleaved)


class _Rotation(Function):
    """A rotation's gradient is rotated back: nothing of x is kept for it."""

    @staticmethod
    def forward(
        ctx: Any, x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        ctx.interleaved = interleaved
        return _turned(x_TNH, cos_TR, sin_TR, interleaved=interleaved)

    @staticmethod
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor | None, ...]:
        cos_TR, sin_TR = ctx.saved_tensors
        back = _turned(grad_TNH, cos_TR, -sin_TR, interleaved=ctx.interleaved)
        return back, None, None, None


def _turned(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, interleaved: bool) -> Tensor:
    cos_T1R = cos_TR[:, None, :].to(x_TNH.dtype)
    sin_T1R = sin_TR[:, None, :].to(x_TNH.dtype)
    rotary_dim = 2 * cos_T1R.shape[-1]
    if interleaved:
        pairs = x_TNH[..., :rotary_dim].unflatten(-1, (-1, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        turned = torch.stack((a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R), -1).flatten(-2)
    else:
        a, b = x_TNH[..., :rotary_dim].chunk(2, -1)
        turned = torch.cat((a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R), -1)
    if rotary_dim == x_TNH.shape[-1]:
        return turned
    return torch.cat((turned, x_TNH[..., rotary_dim:]), -1)
