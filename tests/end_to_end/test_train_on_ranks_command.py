"""`herder train` with a plan of several ranks: started here, asked to stop, or refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from herder.checkpoint.directory import list_checkpoints
from herder.cli.main import run

HERDER = (sys.executable, "-c", "from herder.cli.main import main; main()")
WAIT_SECONDS = 120


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tokenizer_json: str) -> Path:
    """Of a model that trains on two ranks of this machine, for longer than anybody waits."""
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text(small_tokenizer_json)
    (tmp_path / "text.txt").write_text("\n\n".join(["sheep and a wolf at the gate"] * 200))
    written = {
        "run_directory": str(tmp_path / "run"),
        "model": {
            "initialize": "random",
            "config": {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 400,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
            },
        },
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "layout": {"zero_stage": 0},
        "data": {
            "source": str(tmp_path / "text.txt"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
        },
        "train": {"steps": 10**6, "sequence_length": 64, "precision": "fp32"},
        "checkpoint": {"every_steps": 10**6},
        "observe": {"tensorboard": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


def test_ranks_are_started_stop_when_asked_and_save(recipe: Path) -> None:
    events = recipe.parent / "run" / "events.jsonl"
    words = [*HERDER, "train", str(recipe)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + WAIT_SECONDS
        while "StepFinished" not in (events.read_text() if events.exists() else ""):
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                pytest.fail(f"no step was done: {process.communicate()}")
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 143, err
    assert err.count("parameters on DP 2") == 1, "the plan is shown once"
    assert err.count("SIGTERM: finishing this step, then saving") == 1
    assert f"Go on with:\n  herder train {recipe}\n" in out
    (saved,) = list_checkpoints(recipe.parent / "run")
    assert json.loads((saved / "manifest.json").read_text())


def refused(recipe: Path, *overrides: str) -> int:
    """The status of a command that must not train, nor leave anything."""
    flags = [word for override in overrides for word in ("--set", override)]
    status = run(["train", str(recipe), *flags])
    assert not (recipe.parent / "run").exists()
    return status


def test_a_world_that_is_not_the_plans_is_refused_by_the_first_rank_alone(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert refused(recipe) == 2
        err = capsys.readouterr().err
        assert ("the plan is for 2 ranks (dp 2), and 3 were started" in err) == (rank == 0)
        assert rank == 0 or err == ""


def test_several_nodes_are_refused_with_commands_that_would_do(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(recipe, "cluster.nodes=2") == 2
    err = capsys.readouterr().err
    assert "--ntasks-per-node=2 herder train" in err
    assert f"herder train {recipe} --set cluster.nodes=2" in err
    assert "RANK" not in os.environ
