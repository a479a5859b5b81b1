from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from herder.checkpoint.gguf_file import read_gguf
from herder.errors import ModelError, WeightsError
from herder.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]
WriteGguf = Callable[..., Path]


@pytest.fixture
def small(make_decoder: MakeDecoder, write_gguf: WriteGguf) -> Path:
    return write_gguf(make_decoder("llama"), metadata={"general.name": "Zwerg", "x.ratio": 1e-5})


def test_metadata_and_tensors_are_read_with_shapes_slowest_dim_first(small: Path) -> None:
    file = read_gguf(small)
    assert file.metadata["general.name"] == "Zwerg"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["tokenizer.ggml.tokens"][:3] == ["<unk>", "<s>", "</s>"]
    up = file.tensors["blk.1.ffn_up.weight"]
    assert (up.kind, up.shape, up.num_bytes) == ("F32", (80, 48), 80 * 48 * 4)
    assert up.start % 32 == 0


def test_a_float_is_the_decimal_that_was_meant(small: Path) -> None:
    assert read_gguf(small).metadata["x.ratio"] == 1e-5


def test_a_file_cut_short_within_its_tensors_is_refused_with_both_sizes(small: Path) -> None:
    content = small.read_bytes()
    small.write_bytes(content[:-100])
    with pytest.raises(WeightsError, match=rf"cut short: {len(content) - 100:,} bytes of"):
        read_gguf(small)


def test_a_file_cut_short_anywhere_else_is_refused_too(small: Path) -> None:
    content = small.read_bytes()
    for length in range(4, 4000, 37):
        small.write_bytes(content[:length])
        with pytest.raises(WeightsError, match="cut short"):
            read_gguf(small)


@pytest.mark.parametrize("content", [b"", b"GG", b"\x93NUMPY rest of another file"])
def test_another_file_is_no_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_another_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelError, match=f"version {version} cannot be read"):
        read_gguf(path)


def one_tensor(kind: int, *dims: int) -> bytes:
    info = struct.pack("<Q", 1) + b"w" + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info + struct.pack("<IQ", kind, 0)
    return head + bytes(-len(head) % 32 + 4096)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (one_tensor(16, 256), "stored as type 16, which cannot be read"),
        (one_tensor(2, 33), "rows of 33 values"),
        (one_tensor(0, 1, 1, 1, 1, 1), "has 5 dims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 6, 2**50), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQI", 3, 0, 1, 0, 77), "metadata of type 77"),
    ],
)
def test_what_no_file_can_mean_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)
