"""What is written down of a machine, so that a run can be held against where it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from herder.config.machine import describe_host, usable_cores


def nvidia_smi_that_prints(text: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_named_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "NVIDIA H200, 570.86.15\nNVIDIA H200, 570.86.15"
    nvidia_smi_that_prints(told, tmp_path, monkeypatch)
    host = describe_host()
    assert (host["gpus"], host["driver"]) == (["NVIDIA H200"] * 2, "570.86.15")


def test_a_machine_without_gpus_is_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi_that_prints("No devices were found", tmp_path, monkeypatch)
    host = describe_host()
    assert host["cpu"]
    assert host["num_cores"] == usable_cores()
    assert isinstance(host["memory_gb"], float)
    assert host["memory_gb"] > 0.1
    assert host["gpus"] == []
    assert "driver" not in host
