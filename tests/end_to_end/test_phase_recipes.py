"""The recipe of every phase and shape runs on CPU ranks as it is written, with other sizes.

Those of shapes are planned as what they are named after, and their heaviest rank is built.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from herder.cli.main import run
from herder.plan.training import TrainingPlan

REPOSITORY = Path(__file__).resolve().parents[2]
TINY_MODEL = {
    "model.override.num_hidden_layers": 4,
    "model.override.hidden_size": 32,
    "model.override.intermediate_size": 64,
    "model.override.num_attention_heads": 4,
    "model.override.num_key_value_heads": 2,
    "model.override.vocab_size": 49_152,
}
"""Of phases; the comments of shapes have small models."""
TINY_RUN = {
    "data.max_documents": 100,
    "train.steps": 2,
    "train.schedule.warmup_steps": 1,
    "train.sequence_length": 64,
    "train.micro_batch_size": 1,
    "train.global_batch_tokens": 256,
}
PHASES = {
    "phase1_single": (1, "single-GPU dense"),
    "phase1b_naive_data_parallel": (1, "single-GPU dense"),
    "phase2_ddp": (2, "DP dense"),
    "phase3_fsdp": (2, "DP dense"),
    "phase4_3d": (4, "TP dense"),
}
SHAPES = {
    "shape_single_dense_llama_3.2_1b": (1, "single-GPU dense", "one rank"),
    "shape_single_moe_olmoe_1b_7b": (1, "single-GPU MoE", "one rank"),
    "shape_tp_dense_llama_3_70b": (2, "TP dense", "TP 8, DP 16, ZeRO-2"),
    "shape_tp_moe_mixtral_8x7b": (2, "TP MoE", "TP 8, DP 8, ZeRO-1"),
    "shape_ep_moe_qwen3_30b_a3b": (2, "DP attention + EP MoE", "EP 4, DP 16, ZeRO-1"),
    "shape_ep_moe_qwen3_235b_a22b": (2, "DP attention + EP MoE", "EP 8, DP 128, ZeRO-2"),
    "shape_mla_moe_deepseek_v3": (4, "MLA + MoE", "TP 8, EP 8, DP 256, ZeRO-1"),
}
"""How many CPU ranks run a recipe, and its shape; of those named after one, the planned layout."""
TWINS = {"shape_single_dense_llama_3.2_1b", "shape_ep_moe_qwen3_235b_a22b"}
"""Scaled down these do what phase1_single and the 30B model do."""


def documented_line(recipe: Path) -> list[str]:
    """The command that the recipe's comment gives for a CPU."""
    lines = re.findall(r"^# +(herder train (?:.*\\\n# *)*.*)", recipe.read_text(), re.MULTILINE)
    return shlex.split(re.sub(r"\\\n# *", " ", lines[-1]))


@pytest.mark.package_data
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in TWINS else ())
        for name in PHASES | SHAPES
    ],
)
def test_a_recipe_runs_on_cpu_ranks_as_its_comment_says(name: str, tmp_path: Path) -> None:
    num_ranks, shape, *layouts = (PHASES | SHAPES)[name]
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    words = documented_line(REPOSITORY / "recipes" / f"{name}.yaml")
    tiny = TINY_RUN if name in SHAPES else TINY_MODEL | TINY_RUN
    sizes = [word for key, value in tiny.items() for word in ("--set", f"{key}={value}")]
    herder = Path(sys.executable).with_name("herder")
    done = subprocess.run(
        [herder, *words[1:], *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / name
    plan = json.loads((run / "plan.json").read_text())
    degrees = [size for axis, size in plan["mesh_axes"].items() if axis != "ep"]
    assert prod(degrees) == num_ranks
    assert plan["distribution_shape"] == shape
    for layout in layouts:
        split = {axis.upper() for axis in ("tp", "ep") if plan["mesh_axes"][axis] > 1}
        assert split == set(re.findall("TP|EP", layout)), "ranks are split as at full size"
    written = [path.name for path in (run / "checkpoints" / "step-00000002").glob("model*")]
    pieces = [f"model-{rank:05d}.safetensors" for rank in range(num_ranks)]
    assert written == ["model.safetensors"] or set(written) <= set(pieces), written
    assert written
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepFinished"]
    assert steps[-1]["step"] == 2


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_planned_by_itself_and_its_heaviest_rank_holds_what_was_planned(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert run(["plan", "train", f"recipes/{name}.yaml", "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    tried = printed.pop("dry_run")
    plan = TrainingPlan.model_validate_json(json.dumps(printed))
    assert (plan.objective, plan.distribution_shape) == ("simplest", SHAPES[name][1])
    assert plan.layout.told() == SHAPES[name][2]
    for entry in plan.rejected[-1:]:
        assert f"with less, {entry.layout} {entry.reason}." in plan.layout_reason
    assert tried["num_ranks"] == plan.cluster.num_gpus
    assert tried["parameter_bytes"] == plan.state_bytes.parameters
    assert tried["unexplained_bytes"] == tried["padding_bytes"] == 0
