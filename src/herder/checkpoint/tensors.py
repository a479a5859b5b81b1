"""Stored tensors into memory: plain values as they are, GGUF blocks dequantized, rows put in order.

Owns the row order; block formats are the gguf package's knowledge. Legend: O output rows (heads x
head dim), I inputs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from herder.checkpoint.stored import StoredTensor
from herder.errors import WeightsError

PLAIN_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_STORED_DTYPES = {
    **PLAIN_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_VALUES_AT_ONCE = 1 << 17
"""Blocks know nothing of rows. Many at once amortize numpy's calls, few stay in cache."""


def read_tensor(stored: StoredTensor) -> Tensor:
    """One tensor in memory of its own: in its stored dtype, or fp32 from GGUF blocks.

    Raises WeightsError where the file ends early.
    """
    raw = np.fromfile(stored.file, np.uint8, stored.num_bytes, offset=stored.start)
    if raw.size != stored.num_bytes:
        raise WeightsError(f"{stored.file} has become shorter while it was read.")
    if stored.kind in _STORED_DTYPES:
        return torch.from_numpy(raw).view(_STORED_DTYPES[stored.kind]).reshape(stored.shape)
    quantization = GGMLQuantizationType[stored.kind]
    values, num_bytes = GGML_QUANT_SIZES[quantization]
    decoded = np.empty(math.prod(stored.shape), np.float32)
    blocks = raw.reshape(-1, num_bytes)
    at_once = _VALUES_AT_ONCE // values
    for start in range(0, len(blocks), at_once):
        piece = dequantize(blocks[start : start + at_once].reshape(-1), quantization)
        decoded[start * values : start * values + piece.size] = piece
    return torch.from_numpy(decoded).reshape(stored.shape)


def halves_from_neighbours(weight_OI: Tensor, *, num_heads: int) -> Tensor:
    """Rows of q or k for rope that pairs the halves of a head, from those that pair neighbours.

    num_heads: of the projection itself; k has the key-value heads. Biases (one dim) go likewise.
    """
    pairs = weight_OI.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight_OI.shape)
