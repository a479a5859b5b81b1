"""Tensors of a GGUF file, dequantized and in the row order that the model here expects.

Owns the row order; block formats are the gguf package's knowledge. Legend: O output rows (heads x
head dim), I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from herder.checkpoint.gguf_file import TENSOR_TYPES, GgufFile
from herder.checkpoint.gguf_metadata import architecture_of
from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.errors import WeightsError

_BLOCKS: Mapping[str, tuple[int, int]] = {
    name: (values, num_bytes) for name, values, num_bytes in TENSOR_TYPES.values()
}
_VALUES_AT_ONCE = 1 << 17
"""Blocks know nothing of rows. Many at once amortize numpy's calls, few stay in cache."""


class GgufTensors:
    """The tensors of one file by their GGUF names, read one at a time."""

    def __init__(self, file: GgufFile, architecture: ArchitectureConfig) -> None:
        attention = architecture.attention
        assert isinstance(attention, GroupedQueryAttention), "GGUF families have grouped heads"
        self.file = file
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        self._num_heads = {
            "attn_q": attention.num_attention_heads,
            "attn_k": attention.num_key_value_heads,
        }
        self._is_permuted = architecture_of(file).is_permuted

    def read(self, name: str) -> Tensor:
        """One tensor: fp32, or the dtype it is stored in where that is no block format."""
        stored = self.file.tensors[name]
        raw = np.fromfile(self.file.path, np.uint8, stored.num_bytes, offset=stored.start)
        if raw.size != stored.num_bytes:
            raise WeightsError(f"{self.file.path} is cut short in {name}. Fetch the file again.")
        tensor = _decoded(raw, stored.kind, stored.shape)
        part = name.split(".")[-2]
        if self._is_permuted and part in self._num_heads:
            return halves_from_neighbours(tensor, num_heads=self._num_heads[part])
        return tensor


def _decoded(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> Tensor:
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind in plain:
        return torch.from_numpy(raw).view(plain[kind]).reshape(shape)
    values, num_bytes = _BLOCKS[kind]
    num_blocks = raw.size // num_bytes
    decoded = np.empty((num_blocks, values), np.float32)
    at_once = _VALUES_AT_ONCE // values
    for start in range(0, num_blocks, at_once):
        end = min(start + at_once, num_blocks)
        piece = raw[start * num_bytes : end * num_bytes]
        decoded[start:end] = dequantize(piece, GGMLQuantizationType[kind]).reshape(-1, values)
    return torch.from_numpy(decoded).reshape(shape)


def halves_from_neighbours(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """Rows of q or k for rope that pairs the halves of a head, from those that pair neighbours.

    num_heads: of the projection itself; k has the key-value heads. Biases (one dim) go likewise.
    """
    pairs = weight_OI.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight_OI.shape)


def neighbours_from_halves(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """The inverse of halves_from_neighbours: rows as GGUF files hold them."""
    halves = weight_OI.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight_OI.shape)
