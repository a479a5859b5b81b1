from __future__ import annotations

import os

import pytest

from herder.config.catalog import cluster_gpu, gpu
from herder.config.detect import choose_cluster, detect_cluster, parse_nvidia_smi
from herder.config.machine import cpu_device, cpu_share, usable_cores, usable_memory_bytes
from herder.config.run import ClusterConfig
from herder.errors import ConfigError

PLAIN = frozenset({"fpu", "sse2"})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", "h100-80gb"),
        ("NVIDIA H200, 143771", "h200"),
        ("NVIDIA A100-SXM4-40GB, 40960", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB, 81920", "a100-80gb"),
        ("Tesla V100-SXM2-32GB, 32768", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090, 24564", "rtx4090"),
        ("NVIDIA L40S, 46068", "l40s"),
        ("NVIDIA B200, 183359", "b200"),
        ("NVIDIA GB200, 189471", "gb200"),
    ],
)
def test_a_known_gpu_is_recognised_by_name_and_memory(line: str, name: str) -> None:
    (found,) = parse_nvidia_smi(line)
    assert found.name == name
    assert found.memory_gb == gpu(name).memory_gb
    assert found.physical_memory_gib == pytest.approx(int(line.rpartition(",")[2]) / 1024)


def test_an_unknown_gpu_keeps_its_memory_and_says_what_is_assumed() -> None:
    (found,) = parse_nvidia_smi("NVIDIA RTX A5000, 24564")
    assert found.memory_gb == pytest.approx(25.757, abs=0.001)
    assert "not in the catalog: 100 TFLOP/s assumed" in found.name


def test_each_line_is_a_device_and_noise_is_none() -> None:
    assert len(parse_nvidia_smi("NVIDIA H200, 143771\n" * 8)) == 8
    assert parse_nvidia_smi("No devices were found\n") == []
    assert parse_nvidia_smi("") == []


@pytest.mark.parametrize(
    ("features", "fp32_gflops", "bf16_gflops"),
    [
        (PLAIN, 2 * 2 * 8, 2 * 2 * 8),
        (PLAIN | {"avx2"}, 2 * 2 * 32, 2 * 2 * 32),
        (PLAIN | {"avx2", "avx512f", "avx512_bf16"}, 2 * 2 * 64, 2 * 2 * 128),
        (PLAIN | {"avx512f", "avx512_bf16", "amx_bf16"}, 2 * 2 * 64, 2 * 2 * 1024),
        (frozenset({"asimd", "bf16"}), 2 * 2 * 16, 2 * 2 * 32),
    ],
    ids=["plain", "avx2", "avx512_bf16", "amx", "arm"],
)
def test_a_cpus_peak_follows_its_instruction_sets(
    features: frozenset[str], fp32_gflops: float, bf16_gflops: float
) -> None:
    found = cpu_device(num_cores=2, memory_bytes=16e9, mhz=2000.0, features=features)
    assert found.kind == "cpu"
    assert found.memory_gb == 16.0
    assert found.fp32_tflops == pytest.approx(fp32_gflops / 1e3)
    assert found.bf16_tflops == pytest.approx(bf16_gflops / 1e3)


def test_this_machine_is_one_node_with_what_it_has() -> None:
    found = detect_cluster()
    assert found.nodes == 1
    device = cluster_gpu(found)
    if device.kind == "cpu":
        assert found.gpus_per_node == 1
        assert device.memory_gb * 1e9 == pytest.approx(usable_memory_bytes())
        assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_ranks_of_a_cpu_share_its_cores_and_memory() -> None:
    whole, quarter = cpu_share(1), cpu_share(4)
    assert quarter.memory_gb == pytest.approx(whole.memory_gb / 4)
    assert quarter.bf16_tflops == pytest.approx(whole.bf16_tflops / 4)
    assert quarter.memory_bandwidth_gb_per_second == pytest.approx(
        whole.memory_bandwidth_gb_per_second / 4
    )
    assert cluster_gpu(ClusterConfig(nodes=2, gpus_per_node=4, gpu="cpu")) == quarter
    assert cluster_gpu(choose_cluster(None, gpus_per_node=4, gpu_name="cpu")) == quarter
    own = ClusterConfig(gpus_per_node=4, gpu=gpu("cpu"))
    assert cluster_gpu(own) == gpu("cpu"), "figures of one's own are of each device"
    recipe = ClusterConfig(nodes=1, gpus_per_node=2, gpu="cpu")
    assert choose_cluster(recipe, gpus_per_node=4).gpus_per_node == 4
    assert cluster_gpu(choose_cluster(recipe, nodes=2)) == cpu_share(2)


def test_flags_are_laid_over_a_recipes_cluster() -> None:
    given = ClusterConfig(nodes=4, gpus_per_node=4, gpu="a100-80gb")
    assert choose_cluster(given) == given
    more = choose_cluster(given, nodes=8)
    assert (more.nodes, more.gpus_per_node) == (8, 4)
    assert cluster_gpu(more).name == "a100-80gb"
    assert cluster_gpu(choose_cluster(given, gpu_name="b200")).name == "b200"


def test_flags_alone_mean_a_node_of_eight_gpus_or_one_cpu() -> None:
    gpus = choose_cluster(None, gpu_name="h200")
    cpu = choose_cluster(None, gpu_name="cpu")
    assert (gpus.nodes, gpus.gpus_per_node) == (1, 8)
    assert (cpu.nodes, cpu.gpus_per_node) == (1, 1)


def test_no_flags_and_no_recipe_mean_this_machine() -> None:
    assert choose_cluster(None) == detect_cluster()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'h100-80gb'"):
        choose_cluster(None, gpu_name="h100")
