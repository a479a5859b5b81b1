"""Weights in 8 or 4 bits, made as a model is loaded: what is asked for, and what a row takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

QuantizationName = Literal["int8", "int4"]
GroupSize = Literal[32, 64, 128]
QUANTIZATIONS: dict[QuantizationName, int] = {"int8": 8, "int4": 4}
"""Bits of a weight by the format's name."""
GROUP_SIZES: tuple[GroupSize, ...] = (32, 64, 128)
DEFAULT_GROUP_SIZE: GroupSize = 32
BLOCK = 64
"""Inputs that a row is padded to."""
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """How matrices are kept: codes of `bits`, and for each group of inputs of a row a scale and a
    least value in bf16. value = least + scale * code."""

    name: QuantizationName
    group_size: GroupSize = DEFAULT_GROUP_SIZE

    def __str__(self) -> str:
        return f"{self.name} in groups of {self.group_size}"

    @property
    def bits(self) -> int:
        return QUANTIZATIONS[self.name]

    def code_words(self, num_inputs: int) -> int:
        """32-bit words of a row's codes. The last block is filled up."""
        return ceil(num_inputs / BLOCK) * BLOCK * self.bits // WORD_BITS

    def num_groups(self, num_inputs: int) -> int:
        """Of a row; the last one may be shorter. Each has a word for its scale and least value."""
        return ceil(num_inputs / self.group_size)

    def row_words(self, num_inputs: int) -> int:
        """All 32-bit words of a row."""
        return self.code_words(num_inputs) + self.num_groups(num_inputs)


def weight_quantization(
    name: QuantizationName | None, group_size: GroupSize | None
) -> WeightQuantization | None:
    """What two settings ask for; None: nothing."""
    return None if name is None else WeightQuantization(name, group_size or DEFAULT_GROUP_SIZE)
