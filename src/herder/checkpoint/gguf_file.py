"""The layout of a GGUF file: typed metadata, then where each tensor lies. No tensor is read here.

Parsed with the standard library alone, so that a model can be resolved without numpy or torch in a
fraction of a second; every length is checked against the file before it is believed.
Source: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herder.checkpoint.stored import StoredTensor
from herder.errors import ModelError, WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
_MOST_DIMS = 4

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT32, _STRING, _ARRAY = 6, 8, 9

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Type id -> name, values a block, bytes a block."""


@dataclass(frozen=True)
class GgufFile:
    """All that a file says about itself."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it, under which its keys stand."""
        return str(self.metadata.get("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """An entry under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table of a GGUF file.

    Raises ModelError for a file that is no GGUF or has a version or quantization that cannot be
    read, WeightsError for one that is cut short or damaged.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(MAGIC) or file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it does not start with GGUF.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data, path).file()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None


class _Cursor:
    """Reads values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = len(MAGIC)

    def file(self) -> GgufFile:
        (version,) = self.unpack("I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path}: GGUF version {version} cannot be read, known are "
                f"{' and '.join(map(str, VERSIONS))}. Convert the model again with a current tool."
            )
        num_tensors, num_entries = self.unpack("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.string()
            (kind,) = self.unpack("I")
            metadata[key] = self.value(kind)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if type(alignment) is not int or alignment < 1:
            raise self.damaged(f"general.alignment={alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors = {
            name: self.place(name, shape, kind, start + offset)
            for name, shape, kind, offset in infos
        }
        self.refuse_short(tensors)
        return GgufFile(self.path, metadata, tensors)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (num_dims,) = self.unpack("I")
        if num_dims > _MOST_DIMS:
            raise self.damaged(f"tensor {name!r} has {num_dims} dims")
        shape = self.unpack("Q" * num_dims)[::-1]
        kind, offset = self.unpack("IQ")
        return name, shape, kind, offset

    def place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        known = TENSOR_TYPES.get(kind)
        if known is None:
            names = ", ".join(sorted(each for each, _, _ in TENSOR_TYPES.values()))
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as type {kind}, which cannot be read. "
                f"Readable: {names}. Take another quantization of this model."
            )
        label, values, num_bytes = known
        if shape and shape[-1] % values:
            raise self.damaged(f"rows of {shape[-1]} values in tensor {name!r} of type {label}")
        num_blocks = math.prod(shape) // values
        return StoredTensor(self.path, label, shape, start, num_blocks * num_bytes)

    def refuse_short(self, tensors: Mapping[str, StoredTensor]) -> None:
        size = len(self.data)
        cut = [name for name, each in tensors.items() if each.start + each.num_bytes > size]
        if cut:
            end = max(each.start + each.num_bytes for each in tensors.values())
            raise WeightsError(
                f"{self.path} is cut short: {size:,} bytes of {end:,}; {len(cut)} of "
                f"{len(tensors)} tensors are not whole, {cut[0]} first. Fetch the file again."
            )

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.unpack("IQ")
            return self.array(inner, count)
        if kind not in _SCALARS:
            raise self.damaged(f"metadata of type {kind}")
        (value,) = self.unpack(_SCALARS[kind])
        return _shortest(value) if kind == _FLOAT32 else value

    def array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            return list(self.unpack(f"{self.checked(count)}{_SCALARS[kind]}"))
        return [self.value(kind) for _ in range(self.checked(count))]

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.at + length
        if end > len(self.data):
            raise self.damaged(f"a text of {length} bytes")
        text = self.data[self.at : end].decode("utf-8", errors="surrogateescape")
        self.at = end
        return text

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        end = self.at + struct.calcsize(layout)
        if end > len(self.data):
            raise self.damaged("its header")
        values = struct.unpack_from(layout, self.data, self.at)
        self.at = end
        return values

    def checked(self, count: int) -> int:
        """A count that could fit into what is left of the file."""
        if count > len(self.data) - self.at:
            raise self.damaged(f"a list of {count} entries")
        return count

    def damaged(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self.path} is cut short or damaged: at byte {self.at:,} of {len(self.data):,} "
            f"{what} cannot be read. Fetch the file again."
        )


def _shortest(value: float) -> float:
    """The decimal that was meant by a float32: 1e-05 rather than 9.999999747378752e-06."""
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value
