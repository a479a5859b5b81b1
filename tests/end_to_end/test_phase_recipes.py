"""The recipe of every phase runs on CPU ranks as it is written, with other sizes."""

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

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = {
    "model.override.num_hidden_layers": 4,
    "model.override.hidden_size": 32,
    "model.override.intermediate_size": 64,
    "model.override.num_attention_heads": 4,
    "model.override.num_key_value_heads": 2,
    "model.override.vocab_size": 49_152,
    "data.max_documents": 100,
    "train.steps": 2,
    "train.schedule.warmup_steps": 1,
    "train.sequence_length": 64,
    "train.micro_batch_size": 1,
    "train.global_batch_tokens": 256,
}
RANKS = {
    "phase1_single": 1,
    "phase1b_naive_data_parallel": 1,
    "phase2_ddp": 2,
    "phase3_fsdp": 2,
    "phase4_3d": 4,
}


def documented_line(recipe: Path) -> list[str]:
    """The command that the recipe's comment gives for a CPU."""
    lines = re.findall(r"^# +(herder train (?:.*\\\n# *)*.*)", recipe.read_text(), re.MULTILINE)
    return shlex.split(re.sub(r"\\\n# *", " ", lines[-1]))


@pytest.mark.package_data
@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_runs_on_cpu_ranks_as_its_comment_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    words = documented_line(REPOSITORY / "recipes" / f"{name}.yaml")
    sizes = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    herder = Path(sys.executable).with_name("herder")
    done = subprocess.run(
        [herder, *words[1:], *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / name
    plan = json.loads((run / "plan.json").read_text())
    degrees = [size for axis, size in plan["mesh_axes"].items() if axis != "ep"]
    assert prod(degrees) == RANKS[name]
    assert (run / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepFinished"]
    assert steps[-1]["step"] == 2
