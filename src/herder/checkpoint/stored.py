"""Where tensors lie in files and what they are: names, kinds, shapes, places; safetensors headers.

Reads no tensor and imports neither torch nor numpy, so that everything wrong with a model's files
is known before anything is loaded. Source: the format's page, github.com/huggingface/safetensors.
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

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E8M0", "I8", "U8"), 1),
}
"""Dtypes that can be read from safetensors, plain and quantized."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and how it is stored."""

    file: Path
    kind: str
    """F32, F16, BF16, or a GGUF block format such as Q8_0."""
    shape: tuple[int, ...]
    """Slowest dim first, as in torch."""
    start: int
    """Bytes from the start of the file."""
    num_bytes: int


def stored_tensors(files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """The tensors of several safetensors files by name.

    Raises WeightsError that lists every file that is missing or damaged, and names held twice.
    """
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for path in files:
        try:
            header = read_header(path)
        except WeightsError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{name} is in {found[name].file.name} and in {path.name}"
            for name in header.keys() & found.keys()
        ]
        found |= header
    if problems:
        raise WeightsError("\n".join(problems))
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one file by name. Raises WeightsError for a missing, cut or damaged file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, size)))
        entries.pop("__metadata__", None)
        found = {name: _stored(path, entry, 8 + length) for name, entry in entries.items()}
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from None
    end = max((each.start + each.num_bytes for each in found.values()), default=0)
    if end > size:
        cut = [name for name, each in found.items() if each.start + each.num_bytes > size]
        raise _damaged(
            path, f"it is cut short, {size:,} bytes of {end:,}; {len(cut)} tensors are not whole"
        )
    return found


def _stored(path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    value_bytes = DTYPE_BYTES.get(kind)
    if not 0 <= start <= end or any(type(dim) is not int or dim < 0 for dim in shape):
        raise ValueError(f"bytes {start} to {end} for shape {list(shape)}")
    if value_bytes is not None and value_bytes * math.prod(shape) != end - start:
        raise ValueError(f"{kind} of shape {list(shape)} in {end - start} bytes")
    return StoredTensor(path, kind, shape, data_start + start, end - start)


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {what}. Fetch the file again.")


def have_same_bytes(a: StoredTensor, b: StoredTensor, *, chunk_bytes: int = 1 << 24) -> bool:
    """Whether two stored tensors are the same, read piece by piece."""
    if (a.kind, a.shape) != (b.kind, b.shape):
        return False
    with a.file.open("rb") as left, b.file.open("rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        counts = (min(chunk_bytes, a.num_bytes - at) for at in range(0, a.num_bytes, chunk_bytes))
        return all(left.read(count) == right.read(count) for count in counts)
