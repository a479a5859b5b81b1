from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from herder.checkpoint.stored import have_same_bytes, read_header
from herder.errors import WeightsError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def write(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_tensors_are_found_with_dtype_shape_and_place(path: Path) -> None:
    found = read_header(path)
    assert {name: (each.kind, each.shape) for name, each in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }
    content = path.read_bytes()
    a = found["a"]
    assert content[a.start : a.start + a.num_bytes] == struct.pack("<6f", *range(6))


def test_a_file_cut_short_is_refused_with_both_sizes(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(
        WeightsError, match=f"cut short, {len(content) - 3} bytes of {len(content)}"
    ):
        read_header(path)


def test_a_file_cut_short_within_its_header_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for length in range(0, 60, 5):
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError, match="damaged"):
            read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: object) -> None:
    write(tmp_path / "x.safetensors", header, data=bytes(16))
    with pytest.raises(WeightsError, match="damaged"):
        read_header(tmp_path / "x.safetensors")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file"):
        read_header(tmp_path / "absent.safetensors")


def test_two_tensors_are_compared_by_their_bytes(tmp_path: Path) -> None:
    a = torch.arange(1000.0)
    b = a.clone()
    b[999] += 1
    save_file(
        {"a": a, "same": a.clone(), "other": b, "wide": a.double()}, tmp_path / "x.safetensors"
    )
    found = read_header(tmp_path / "x.safetensors")
    assert have_same_bytes(found["a"], found["same"], chunk_bytes=64)
    assert not have_same_bytes(found["a"], found["other"], chunk_bytes=64)
    assert not have_same_bytes(found["a"], found["wide"])
