from __future__ import annotations

import pytest

from herder.config.catalog import (
    PUBLISHED,
    catalog_name,
    cluster_gpu,
    debug_model_names,
    gpu,
    gpu_names,
    model_config_json,
    model_names,
)
from herder.config.run import ClusterConfig
from herder.errors import ConfigError, ModelError

GPUS = (
    "a100-40gb a100-80gb h100-80gb h200 h800 b200 b300 gb200 gb300 l40s mi300x rtx4090 v100-32gb"
    " cpu"
)


def test_the_devices_that_commands_promise_are_there() -> None:
    assert set(gpu_names()) == set(GPUS.split())


@pytest.mark.parametrize("name", GPUS.split())
def test_figures_are_of_the_right_size(name: str) -> None:
    entry = gpu(name)
    assert entry.name == name
    if entry.kind == "gpu":
        assert 24 <= entry.memory_gb <= 288
        assert 100 <= entry.bf16_tflops <= 2500
        assert 800 <= entry.memory_bandwidth_gb_per_second <= 8000
        if entry.fp8_tflops is not None:
            assert entry.fp8_tflops == pytest.approx(2 * entry.bf16_tflops, rel=0.02)


def test_an_80_gb_device_is_80e9_bytes() -> None:
    assert gpu("h100-80gb").memory_gb == 80
    assert gpu("b200").memory_gb == 180


def test_names_are_found_in_any_case() -> None:
    assert gpu("H100-80GB") == gpu("h100-80gb")
    assert model_config_json("Llama-2-7B")["hidden_size"] == 4096


@pytest.mark.parametrize(("given", "told"), [("h100", "'h100-80gb'"), ("a100", "'a100-40gb'")])
def test_an_unknown_device_gets_a_near_one(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean {told}"):
        gpu(given)


def test_an_unknown_model_gets_a_near_one() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'llama-2-7b'\?"):
        model_config_json("llama-2-7c")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("Mixtral-8x7B", "mixtral-8x7b-v0.1"),
        ("olmoe", "olmoe-1b-7b-0924"),
        ("deepseek-v3", "deepseek-v3"),
        ("llama-4-scout", "llama-4-scout-17b-16e"),
        ("mistral-7b", None),
        ("llama-3", None),
        ("qwen3-3", None),
        ("Llama-Debug", "llama-debug"),
        ("llama4", None),
        ("", None),
    ],
)
def test_a_name_may_end_where_only_one_model_goes_on(given: str, meant: str | None) -> None:
    assert catalog_name(given) == meant


@pytest.mark.parametrize("name", ["", "../gpus", "/etc/passwd", "sub/llama-2-7b"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(ModelError):
        model_config_json(name)


def test_every_model_is_a_config_with_a_source() -> None:
    sources = (PUBLISHED / "SOURCES.md").read_text()
    assert len(model_names()) == 40
    for name in model_names():
        assert name == name.lower()
        assert "model_type" in model_config_json(name)
        assert f"| {name} |" in sources


def test_tiny_models_of_our_own_are_no_published_ones() -> None:
    expected = {"llama", "moe", "mla", "sliding-window", "llama4"}
    assert {name.removesuffix("-debug") for name in debug_model_names()} == expected
    assert not {*debug_model_names()} & {*model_names()}
    with pytest.raises(ModelError, match=r"Did you mean 'mla-debug'\?"):
        model_config_json("mla-debg")


def test_a_config_may_be_changed_without_harm() -> None:
    model_config_json("llama-2-7b")["hidden_size"] = 1
    assert model_config_json("llama-2-7b")["hidden_size"] == 4096


def test_a_cluster_names_its_device_or_brings_it() -> None:
    assert cluster_gpu(ClusterConfig(gpu="b200")) == gpu("b200")
    own = gpu("b200").model_copy(update={"memory_gb": 12.0})
    assert cluster_gpu(ClusterConfig(gpu=own)).memory_gb == 12.0
