"""The header of a safetensors file: names, dtypes, shapes and places, checked against the file.

Reads no tensor and imports no torch, so that everything wrong with a model's files is known before
anything is loaded. Source: the format's description, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herder.errors import WeightsError

DTYPE_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that weights are read from; others belong to quantized models."""
_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and what it is."""

    file: Path
    dtype: str
    """As the format spells it: F32, F16, BF16."""
    shape: tuple[int, ...]
    start: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one file by name. Raises WeightsError for a missing, cut or damaged file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", first)[0] if len(first) == _LENGTH_BYTES else None
            if length is None or length > min(size - _LENGTH_BYTES, _LONGEST_HEADER_BYTES):
                raise _damaged(path, f"{size:,} bytes do not hold the header they announce")
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None
    try:
        entries = json.loads(text)
        tensors = {
            name: _stored(path, entry, _LENGTH_BYTES + length)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged(path, "its header is not that of a safetensors file") from None
    _refuse_bad_places(path, tensors, size)
    return tensors


def _stored(path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not 0 <= start <= end or any(type(dim) is not int or dim < 0 for dim in shape):
        raise ValueError("offsets or dims that no tensor can have")
    return StoredTensor(path, entry["dtype"], shape, data_start + start, end - start)


def _refuse_bad_places(path: Path, tensors: Mapping[str, StoredTensor], size: int) -> None:
    end = max((each.start + each.num_bytes for each in tensors.values()), default=0)
    if end > size:
        cut = [name for name, each in tensors.items() if each.start + each.num_bytes > size]
        raise _damaged(
            path, f"it is cut short, {size:,} bytes of {end:,}; {len(cut)} tensors are not whole"
        )
    for name, each in tensors.items():
        wanted = DTYPE_BYTES.get(each.dtype)
        if wanted is not None and wanted * math.prod(each.shape) != each.num_bytes:
            raise _damaged(path, f"{name} of shape {list(each.shape)} has {each.num_bytes} bytes")


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {what}. Fetch the file again.")


def have_same_bytes(a: StoredTensor, b: StoredTensor, *, chunk_bytes: int = 1 << 24) -> bool:
    """Whether two stored tensors are the same, read piece by piece."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as left, b.file.open("rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        for at in range(0, a.num_bytes, chunk_bytes):
            count = min(chunk_bytes, a.num_bytes - at)
            if left.read(count) != right.read(count):
                return False
    return True
