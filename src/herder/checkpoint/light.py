"""Light checkpoints: weights as what changed since a full one, to the bit, in zip archives.

A rank writes the difference to the file that it wrote of the full checkpoint, whose tensors are the
same parts. Values are subtracted as integers, so that what moved little has high bytes of zero; the
sign goes to the lowest bit, and each byte of the values is a plane of its own, compressed where
that gains anything. The archive is Python's zipfile's, which checks what it reads.

    light-00000130/
        model.delta.zip                entries TENSOR/BLOCK/BYTE; of ranks model-00000.delta.zip ...
        manifest.json                  names step-00000100 and the sha256 of its manifest
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from herder.checkpoint.manifest import FileEntry, base_of
from herder.checkpoint.source import DELTA
from herder.checkpoint.stored import read_header
from herder.checkpoint.tensors import read_tensor
from herder.errors import CheckpointError

_VALUES_AT_ONCE = 1 << 22
_SAMPLE_BYTES = 1 << 16
_WORTH_IT = 0.97
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class _Hashing:
    """A file that can only be written on to, as zipfile takes it, and is hashed on the way."""

    def __init__(self, file: Any) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def write(self, content: Any) -> int:
        self.digest.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def write_delta(
    path: Path, items: list[WriteItem], planner: SavePlanner, *, base: Path
) -> FileEntry:
    """Write how the tensors of a plan differ from those of their names in a full checkpoint's file,
    and wait until it is on the disk. One block of a tensor is in memory besides it."""
    before = read_header(base)
    with path.open("wb") as file:
        hashing: Any = _Hashing(file)
        with ZipFile(hashing, "w") as archive:
            for item in items:
                name = item.index.fqn
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), f"{name} is no tensor"
                new = _words(tensor.cpu().contiguous())
                for block, part in _blocks(new):
                    start = before[name].start + block * _VALUES_AT_ONCE * new.itemsize
                    old = np.fromfile(base, new.dtype, len(part), offset=start)
                    for byte, plane in enumerate(_planes(part - old)):
                        entry = ZipInfo(f"{name}/{block}/{byte}")
                        archive.writestr(entry, plane, _method(plane), compresslevel=1)
        file.flush()
        os.fsync(file.fileno())
        return {"num_bytes": file.tell(), "sha256": hashing.digest.hexdigest()}


def read_delta(path: Path, name: str) -> Tensor:
    """A tensor of a light checkpoint's file, or this file's part of one, as it was.

    Raises CheckpointError where the archive, or the full checkpoint's file, cannot be read.
    """
    try:
        tensor = read_tensor(read_header(full_file(path))[name])
        words = _words(tensor)
        with ZipFile(path) as archive:
            for block, part in _blocks(words):
                planes = [archive.read(f"{name}/{block}/{b}") for b in range(words.itemsize)]
                part += _from_planes(planes, words.dtype)
    except (OSError, BadZipFile, KeyError, zlib.error) as error:
        raise CheckpointError(f"{path}: {name} cannot be restored: {error}") from None
    return tensor


def full_file(path: Path) -> Path:
    """The file of the full checkpoint that a light one's file says the differences to."""
    base = base_of(path.parent)
    if base is None:
        raise CheckpointError(f"{path.parent}: its manifest names no full checkpoint.")
    return base / f"{path.name.removesuffix(DELTA)}.safetensors"


def _words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The values as unsigned integers, in the same memory."""
    own_bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return own_bytes.view(_UNSIGNED[tensor.itemsize])


def _blocks(words: np.ndarray[Any, Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    for start in range(0, len(words), _VALUES_AT_ONCE):
        yield start // _VALUES_AT_ONCE, words[start : start + _VALUES_AT_ONCE]


def _planes(difference: np.ndarray[Any, Any]) -> list[bytes]:
    """The lowest byte of each value, then the next; a negative one is flipped, its sign lowest."""
    one = difference.dtype.type(1)
    sign = difference >> (8 * difference.itemsize - 1)
    folded = (difference << one) ^ (~sign + one)
    by_value = folded.view(np.uint8).reshape(len(folded), -1)
    return [by_value[:, byte].tobytes() for byte in range(by_value.shape[1])]


def _from_planes(planes: list[bytes], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    by_value = np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1)
    folded = by_value.view(dtype).reshape(-1)
    one = dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _method(plane: bytes) -> int:
    """Deflate, where a sample says that it gains anything."""
    sample = plane[:_SAMPLE_BYTES]
    return ZIP_DEFLATED if len(zlib.compress(sample, 1)) < _WORTH_IT * len(sample) else ZIP_STORED
