"""A safetensors file written tensor by tensor, so that no more than one is in memory for it.

The library's writer wants all of them at once, which for a sharded run would be the whole model and
its optimizer on one machine. Format: safetensors' README, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class TensorSource:
    """Whole tensors by name, to be read one after the other, each once and in this order."""

    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], Tensor]
    """On several ranks a collective: those that write nothing read all the same."""

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        sizes = (
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes.values()
        )
        return sum(sizes)


def held_here(tensors: Mapping[str, Tensor]) -> TensorSource:
    """Tensors that this process has whole."""
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return TensorSource(shapes, tensors.__getitem__)


def write_tensors(path: Path, source: TensorSource) -> None:
    """Write all tensors of a source to one file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in source.shapes.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in source.shapes:
            tensor = source.read(name).detach().cpu().contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
