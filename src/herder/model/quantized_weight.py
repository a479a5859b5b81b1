"""Matrices in 8 or 4 bits: a parameter that Linear and Experts hold in place of a wide one.

Owns the packing, rounding to nearest and back. Who multiplies with it is linear's and
quantized_kernels.cpp's knowledge, which read the same layout.

Legend: R rows, I inputs, G groups of inputs that share a scale, S inputs of a group, W words.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.config.quantization import WORD_BITS, WeightQuantization
from herder.model.kernels import DTYPES, Kernels

_LANES = 8
"""Neighbours lie in as many neighbouring words, at the same place."""
_NUMBERS_AT_ONCE = 1 << 18
"""Quantized at once: what is held beside the wide matrix and the packed one is a few times that."""


class QuantizedWeight(nn.Parameter):
    """int32 words [..., O, W]: of each row its codes, then a word a group, scale | least << 16.

    Not trained. What is made of it by indexing or viewing is plain words.
    """

    def __new__(cls, words: Tensor, how: WeightQuantization, num_inputs: int) -> Self:
        del how, num_inputs
        return super().__new__(cls, words, requires_grad=False)

    def __init__(self, words: Tensor, how: WeightQuantization, num_inputs: int) -> None:
        del words
        self.how = how
        self.num_inputs = num_inputs

    def part(self, index: int | slice) -> QuantizedWeight:
        """The matrix of one expert, or some rows of a matrix."""
        return QuantizedWeight(self.data[index], self.how, self.num_inputs)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The numbers it stands for, [..., O, I]."""
        words_RW, how = self.data.flatten(0, -2), self.how
        if Kernels.operators is not None and words_RW.device.type == "cpu" and dtype in DTYPES:
            given = words_RW, self.num_inputs, dtype, how.bits, how.group_size
            wide_RI = Kernels.operators.dequantized(*given)
        else:
            wide_RI = _wide(words_RW, how, self.num_inputs).to(dtype)
        return wide_RI.unflatten(0, self.shape[:-1])


def quantized(matrix: Tensor, how: WeightQuantization) -> QuantizedWeight:
    """[..., O, I] in `how`, rounded to nearest: nothing is further from its value than half its
    group's scale, but for the last bit of bf16 in fp32 arithmetic.

    Raises ValueError where a number is not finite.
    """
    num_inputs = matrix.shape[-1]
    shape = (*matrix.shape[:-1], how.row_words(num_inputs))
    words = torch.empty(shape, dtype=torch.int32, device=matrix.device)
    step = max(1, _NUMBERS_AT_ONCE // num_inputs)
    parts = zip(matrix.flatten(0, -2).split(step), words.flatten(0, -2).split(step), strict=True)
    for rows_RI, words_RW in parts:
        words_RW.copy_(_packed(rows_RI.float(), how))
    return QuantizedWeight(words, how, num_inputs)


def _packed(rows_RI: Tensor, how: WeightQuantization) -> Tensor:
    if not rows_RI.isfinite().all():
        raise ValueError("a number of it is not finite")
    num_rows, num_inputs = rows_RI.shape
    num_groups, bits = how.num_groups(num_inputs), how.bits
    # The last number again fills the last group: its range stays what it is.
    filled = (0, num_groups * how.group_size - num_inputs)
    values_RGS = F.pad(rows_RI, filled, mode="replicate").view(num_rows, num_groups, -1)
    least_RG = -_at_least(-values_RGS.amin(-1))
    largest_code = (1 << bits) - 1
    scale_RG = _at_least((values_RGS.amax(-1) - least_RG) / largest_code)
    divisor_RG1 = scale_RG.where(scale_RG > 0, 1.0)[:, :, None]
    codes_RGS = ((values_RGS - least_RG[:, :, None]) / divisor_RG1).round().clamp(0, largest_code)
    codes_RI = codes_RGS.flatten(1).int()
    padded = how.code_words(num_inputs) * WORD_BITS // bits
    codes_RI = F.pad(codes_RI, (0, padded - codes_RI.shape[1]))
    placed = codes_RI.view(num_rows, -1, WORD_BITS // bits, _LANES) << _places(codes_RI, bits)
    codes_RW = placed.sum(2, dtype=torch.int32).flatten(1)  # no two have a bit in common
    groups_RG = torch.stack((scale_RG, least_RG), -1).bfloat16().view(torch.int32)[:, :, 0]
    return torch.cat((codes_RW, groups_RG), 1)


def _at_least(x: Tensor) -> Tensor:
    """The smallest bf16 numbers that are not below these, in fp32."""
    near = x.bfloat16()
    return torch.where(near < x, near.nextafter(near.new_tensor(torch.inf)), near).float()


def _places(like: Tensor, bits: int) -> Tensor:
    return torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=like.device)[:, None]


def _wide(words_RW: Tensor, how: WeightQuantization, num_inputs: int) -> Tensor:
    """[R, I] in fp32."""
    sizes = [how.code_words(num_inputs), how.num_groups(num_inputs)]
    codes_RW, groups_RG = words_RW.split(sizes, dim=1)
    placed = codes_RW.unflatten(1, (-1, 1, _LANES)) >> _places(words_RW, how.bits)
    codes_RI = (placed & (1 << how.bits) - 1).flatten(1)[:, :num_inputs].float()
    pairs_RG2 = groups_RG.contiguous().view(torch.bfloat16).unflatten(1, (-1, 2)).float()
    scale_RI, least_RI = (
        each.repeat_interleave(how.group_size, 1)[:, :num_inputs] for each in pairs_RG2.unbind(2)
    )
    return torch.addcmul(least_RI, scale_RI, codes_RI)
