"""The manifest: a folder is whole, or the message names every file that is not."""

from pathlib import Path

import pytest

from herder.checkpoint.manifest import MANIFEST, verify_manifest, write_manifest
from herder.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(b"a" * 100)
    (tmp_path / "b.bin").write_bytes(b"b" * 50)
    write_manifest(tmp_path)
    return tmp_path


def test_a_whole_folder_verifies_and_its_size_is_told(folder: Path) -> None:
    verify_manifest(folder, reads_contents=True)
    (folder / MANIFEST).unlink()
    assert write_manifest(folder) == 150


def test_all_damage_is_told_together(folder: Path) -> None:
    (folder / "a.bin").unlink()
    (folder / "b.bin").write_bytes(b"b" * 49)
    with pytest.raises(CheckpointError, match=r"a.bin is missing; b.bin has 49 bytes of 50"):
        verify_manifest(folder, reads_contents=False)


def test_a_flipped_bit_is_found_by_reading_contents(folder: Path) -> None:
    (folder / "b.bin").write_bytes(b"b" * 49 + b"c")
    verify_manifest(folder, reads_contents=False)
    with pytest.raises(CheckpointError, match=r"b\.bin has another sha256"):
        verify_manifest(folder, reads_contents=True)


def test_a_folder_without_a_manifest_was_never_finished(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="never finished"):
        verify_manifest(folder, reads_contents=False)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"files": {"a": 3}}'])
def test_a_manifest_that_is_not_one_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify_manifest(folder, reads_contents=False)
