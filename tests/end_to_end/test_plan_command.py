"""`herder plan` as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from herder.cli.main import run

H100_NODE = ("--nodes", "1", "--gpus-per-node", "8", "--gpu", "h100-80gb")
H100_CLUSTER = ("--nodes", "2048", "--gpus-per-node", "8", "--gpu", "h100-80gb")

WATCHED = """
import sys
from herder.cli.main import run
status = run(sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "pandas", "rich", "yaml"} & sys.modules.keys()
print(sorted(heavy), file=sys.stderr)
sys.exit(status)
"""


def herder(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCHED, "plan", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        timeout=120,
        check=False,
    )


def planned(*arguments: str) -> dict[str, Any]:
    done = herder(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_planning_imports_nothing_heavy_and_starts_at_once() -> None:
    began = time.perf_counter()
    done = herder("train", "llama-2-7b", *H100_NODE, "--json")
    print(f"herder plan train llama-2-7b took {time.perf_counter() - began:.2f} s")
    assert done.returncode == 0
    assert done.stderr == "[]\n"


def test_training_llama_2_7b_on_one_node() -> None:
    plan = planned("train", "llama-2-7b", *H100_NODE)
    layout = plan["layout"]
    assert layout["zero_stage"] == 1
    assert layout["tensor_parallel_size"] == layout["pipeline_parallel_size"] == 1
    assert layout["data_parallel_size"] == 8
    assert layout["context_parallel_size"] == layout["expert_parallel_size"] == 1
    assert plan["memory_gb"]["state"] == pytest.approx(37.1, abs=0.05)
    assert plan["memory_gb"]["total"] > plan["memory_gb"]["activations"] > 0
    assert plan["parameters"] == plan["active_parameters"] == 6_738_415_616
    assert 0 < plan["model_flops_utilization"] < 1


def test_training_the_405b_model_on_16384_gpus() -> None:
    plan = planned("train", "llama-3.1-405b", *H100_CLUSTER)
    layout = plan["layout"]
    assert (layout["tensor_parallel_size"], layout["pipeline_parallel_size"]) == (8, 4)
    assert (layout["data_parallel_size"], layout["zero_stage"]) == (512, 1)
    assert 50.9 <= plan["memory_gb"]["state"] <= 51.1
    assert plan["memory_gb"]["largest_rank_state"] >= 51.3


def test_serving_llama_2_7b() -> None:
    node = ("--gpus-per-node", "8", "--gpu", "h100-80gb")
    plan = planned("serve", "llama-2-7b", *node, "--tensor-parallel", "8", "--context", "8192")
    assert plan["weights_gb_per_gpu"] == pytest.approx(1.7, abs=0.05)
    assert plan["kv_cache_gb_per_gpu"] == pytest.approx(66.3, abs=0.05)
    assert plan["kv_bytes_per_token_per_gpu"] == 65_536
    assert plan["max_concurrent_sequences"] == 123


def test_serving_the_405b_model() -> None:
    node = ("--gpus-per-node", "8", "--gpu", "h100-80gb")
    plan = planned("serve", "llama-3.1-405b", *node, "--context", "8192")
    assert plan["weight_dtype"] == plan["kv_cache_dtype"] == "fp8"
    assert plan["weights_gb_per_gpu"] == pytest.approx(50.7, abs=0.05)
    assert 17.2 <= plan["kv_cache_gb_per_gpu"] <= 17.4
    assert plan["max_concurrent_sequences"] == 65
    assert plan["distribution_shape"] == "TP dense"
    assert any("bf16 is a wall" in note for note in plan["notes"])
    assert any("63 when embedding and head stay in bf16" in note for note in plan["notes"])


def test_training_a_mixture_of_experts_by_a_short_name() -> None:
    plan = planned("train", "mixtral-8x7b", "--nodes", "4", "--gpu", "h100-80gb")
    assert plan["model"] == "mixtral-8x7b-v0.1"
    assert (plan["parameters"], plan["active_parameters"]) == (46_702_792_704, 12_879_925_248)
    layout = plan["layout"]
    assert (layout["expert_parallel_size"], layout["zero_stage"]) == (8, 1)
    assert plan["step_time_seconds"]["expert_parallel"] > 0


def test_serving_a_model_whose_weights_are_published_quantized() -> None:
    one = ("--gpus-per-node", "1", "--gpu", "h100-80gb")
    plan = planned("serve", "gpt-oss-120b", *one)
    assert plan["weight_dtype"] == "mxfp4"
    assert plan["distribution_shape"] == "single-GPU MoE"
    assert plan["weights_gb_per_gpu"] == pytest.approx(65.2, abs=0.1)
    plan = planned("serve", "deepseek-v3", "--nodes", "2", "--gpu", "h100-80gb")
    assert plan["weight_dtype"] == "fp8"
    assert plan["distribution_shape"] == "MLA + MoE"
    assert plan["layout"]["expert_parallel_size"] == 16
    assert plan["kv_bytes_per_token_per_gpu"] == 61 * 576


def test_a_recipe_is_planned_and_its_design_written(tmp_path: Path, repository: Path) -> None:
    recipe, page = repository / "recipes" / "demo.yaml", tmp_path / "design.md"
    price = ("--gpu-hour-price", "0.5")
    done = herder("train", str(recipe), "--set", "train.steps=7", "-o", str(page), *price, "--json")
    assert done.returncode == 0, done.stderr
    assert f"The design is in {page}." in done.stderr
    plan = json.loads(done.stdout)
    assert plan["parameters"] == 134_515_008
    text = page.read_text()
    assert f"7 of {plan['global_batch_tokens']:,} tokens" in text
    assert "at the price given" in text


def test_a_dry_run_builds_the_heaviest_of_16384_ranks_in_little_memory() -> None:
    began = time.perf_counter()
    done = herder("train", "llama-3.1-405b", *H100_CLUSTER, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    tried = plan["dry_run"]
    peak = tried["peak_memory_bytes"] / 1e9
    print(f"405B on 16,384 ranks took {time.perf_counter() - began:.1f} s and {peak:.2f} GB")
    assert peak < 2.0
    assert (tried["rank"], tried["num_ranks"]) == (4096, 16_384)
    assert tried["coordinates"] == {"pp": 1, "dp": 0, "fsdp": 0, "cp": 0, "tp": 0}
    assert tried["parameter_bytes"] == tried["planned_parameter_bytes"]
    assert tried["parameter_bytes"] == plan["state_bytes"]["parameters"] == 99_622_912
    assert tried["unexplained_bytes"] == tried["padding_bytes"] == 0
    assert "in a world of 16,384, as its heaviest rank" in done.stderr


def test_a_dry_run_of_a_recipe_as_a_given_rank_tells_what_makes_the_difference(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {source: llama-debug, initialize: random}\n"
        "cluster: {nodes: 1, gpus_per_node: 5, gpu: cpu}\n"
        "layout: {zero_stage: 1}\n"
    )
    done = herder("train", str(recipe), "--dry-run", "--rank", "4")
    assert done.returncode == 0, done.stderr
    assert "Dry run of rank 4 of 5 (pp 0, dp 0, fsdp 4, cp 0, tp 0)" in done.stdout
    assert re.search(r"difference +([\d,]+) bytes, \1 of them padding", done.stdout)


def test_ranks_of_a_cpu_are_planned_with_their_share_of_the_machine() -> None:
    def device(count: str) -> dict[str, Any]:
        cluster = ("--nodes", "1", "--gpus-per-node", count, "--gpu", "cpu")
        return planned("train", "llama-debug", *cluster)["cluster"]["gpu"]

    one, four = device("1"), device("4")
    assert four["memory_gb"] == pytest.approx(one["memory_gb"] / 4)


def test_people_get_tables() -> None:
    done = herder("train", "llama-2-7b", *H100_NODE)
    assert done.returncode == 0
    for heading in ("Training plan: llama-2-7b", "Memory", "Step time", "feed-forward"):
        assert heading in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "llama-2-7c"), "Did you mean 'llama-2-7b'?"),
        (("train", "llama-2-7b", "--gpu", "h100"), "Did you mean 'h100-80gb'?"),
        (("train", "llama-2-7b", "--nodes", "0"), "not in the range x>=1"),
        (("train", "llama-2-7b", "--objective", "best"), "'best' is not one of"),
        (("train", "llama-2-7b", "-o", "design.md"), "is a model"),
        (("train", "llama-2-7b", "--gpu-hour-price", "2"), "give -o design.md too"),
        (("train", "absent.yaml"), "there is no such recipe"),
        (("train", "llama-2-7b", "--rank", "1"), "give --dry-run too"),
        (
            ("train", "llama-2-7b", *H100_NODE, "--dry-run", "--rank", "8"),
            "--rank 8: the plan has 8 ranks (DP 8, ZeRO-1), counted from 0. Give --rank 0 to 7",
        ),
        (
            ("train", "llama-2-7b", "--gpus-per-node", "1", "--gpu", "rtx4090"),
            "Smallest cluster that would do: --nodes 1 --gpus-per-node 8 --gpu rtx4090.",
        ),
        (
            ("serve", "llama-3-70b", "--gpus-per-node", "1", "--gpu", "h100-80gb"),
            "Smallest cluster that would do: --nodes 1 --gpus-per-node 2 --gpu h100-80gb.",
        ),
        (
            ("serve", "qwen2.5-7b", "--gpu", "h100-80gb", "--tensor-parallel", "8"),
            "Legal here: 1, 2, 4.",
        ),
        (("serve", "llama-2-7b", "--utilization", "nan"), "nan is not a finite number"),
        (("train", "r.yaml", "-o", "d.md", "--gpu-hour-price", "inf"), "inf is not a finite"),
    ],
)
def test_a_mistake_is_a_message_and_exit_status_2(
    arguments: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert list(tmp_path.iterdir()) == []
