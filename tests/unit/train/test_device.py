"""Devices: a measured peak that is kept, and a catalog's for GPUs."""

import json
from pathlib import Path

import pytest
import torch

from herder.config.catalog import gpu
from herder.train.device import (
    PEAK_FILE,
    choose_device,
    describe_device,
    measure_gemm_flops_per_second,
    peak_flops_per_second,
    peak_memory_bytes,
)

CPU = torch.device("cpu")


def test_a_cpus_peak_is_measured_once_and_kept(tmp_path: Path) -> None:
    first, told = peak_flops_per_second(CPU, gpu("cpu"), precision="fp32", run_directory=tmp_path)
    assert 1e9 < first < 1e15
    assert "measured" in told
    kept = json.loads((tmp_path / PEAK_FILE).read_text())
    assert list(kept.values()) == [first]
    again, _ = peak_flops_per_second(CPU, gpu("cpu"), precision="fp32", run_directory=tmp_path)
    assert again == first


@pytest.mark.parametrize("kept", ["{", "[]", "3"])
def test_a_damaged_measurement_is_made_again(kept: str, tmp_path: Path) -> None:
    (tmp_path / PEAK_FILE).write_text(kept)
    peak, _ = peak_flops_per_second(CPU, gpu("cpu"), precision="fp32", run_directory=tmp_path)
    assert list(json.loads((tmp_path / PEAK_FILE).read_text()).values()) == [peak]


def test_a_gpus_peak_is_the_catalogs(tmp_path: Path) -> None:
    h100 = gpu("h100-80gb")
    peak, told = peak_flops_per_second(
        torch.device("cuda", 0), h100, precision="bf16", run_directory=tmp_path
    )
    assert (peak, told) == (h100.bf16_tflops * 1e12, "h100-80gb")
    assert not (tmp_path / PEAK_FILE).exists()


def test_bf16_is_held_against_no_less_than_fp32() -> None:
    fp32 = measure_gemm_flops_per_second("fp32")
    assert measure_gemm_flops_per_second("bf16") > fp32 / 3


def test_the_cpu_is_described_with_its_threads() -> None:
    assert describe_device(CPU).startswith(f"cpu, {torch.get_num_threads()} thread")
    assert peak_memory_bytes(CPU) > 10_000_000


@pytest.mark.device
def test_a_gpu_is_chosen_where_there_is_one() -> None:
    assert choose_device().type == "cuda"
    assert peak_memory_bytes(choose_device()) >= 0
