"""A safetensors file written tensor by tensor, so that no more than one is in memory for it.

The library's writer wants all of them at once, which would be a second copy of what a rank holds.
What is written is hashed beside it. Format: safetensors' README, "Format".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem

from herder.checkpoint.manifest import FileEntry

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BYTES_AT_ONCE = 1 << 24
"""Hashed while they are in cache; the system brings earlier ones to the disk meanwhile."""
_CAN_ADVISE = hasattr(os, "posix_fadvise")


def write_tensors(path: Path, items: list[WriteItem], planner: SavePlanner) -> FileEntry:
    """Write what a plan has for one file, each tensor or part of one by its name, and wait until it
    is on the disk.

    The planner gives their values, on any device.
    """
    # from wide to narrow dtypes, so that each tensor is aligned
    items = sorted(items, key=lambda item: -_described(item).properties.dtype.itemsize)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        begun = 0

        def write(content: memoryview) -> None:
            nonlocal begun
            for start in range(0, len(content), _BYTES_AT_ONCE):
                part = content[start : start + _BYTES_AT_ONCE]
                hashed = beside.submit(digest.update, part)
                file.write(part)
                hashed.result()
                if file.tell() - begun >= _BYTES_AT_ONCE:
                    begun = _begin_to_sync(file, begun)

        write(memoryview(_header({item.index.fqn: _described(item) for item in items})))
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
            values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            write(values.numpy().data)
        file.flush()
        os.fsync(file.fileno())
        return {"num_bytes": file.tell(), "sha256": digest.hexdigest()}


def _begin_to_sync(file: BufferedWriter, start: int) -> int:
    """Have the system bring what was written from `start` on to the disk, without waiting for it;
    where that ends. By itself it begins when a tenth of all memory waits, and the disk stands still
    until then. Linux does so where pages that are not on the disk are said not to be needed.
    """
    file.flush()
    end = file.tell()
    if _CAN_ADVISE:
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def _described(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data


def _header(tensors: Mapping[str, TensorWriteData]) -> bytes:
    """The length of the description, and the description of all tensors, padded to eight bytes.

    Which part of a tensor it is stands where torch's HuggingFaceStorageReader looks for it.
    """
    places = {name: {"saved_offsets": list(each.chunk.offsets)} for name, each in tensors.items()}
    told = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
    header: dict[str, object] = {"__metadata__": told}
    end = 0
    for name, each in tensors.items():
        dtype, shape = each.properties.dtype, each.chunk.sizes
        start, end = end, end + shape.numel() * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
