"""`herder train` with a plan of several ranks: started, stopped, refused, hung, killed, told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from herder.checkpoint.directory import list_checkpoints
from herder.cli.main import run

HERDER = (sys.executable, "-c", "from herder.cli.main import main; main()")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCHERS = {"herder": HERDER, "torchrun": (*TORCHRUN, "--no-python", *HERDER)}
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
    assert not (recipe.parent / "run" / "collectives").exists(), "nobody asked for traces"


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


def report(recipe: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """What `herder report` tells of the run, for scripts and for people."""
    capsys.readouterr()
    assert run(["report", str(recipe.parent / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert run(["report", str(recipe.parent / "run")]) == 0
    return told, capsys.readouterr().out


def fail_in_a_step(
    recipe: Path, launcher: Sequence[str], number: signal.Signals, *settings: str, rank: int = 1
) -> str:
    """Send one rank that signal while it trains; what was told once all have ended."""
    words = [str(recipe), "--set", "train.collective_timeout_seconds=15"]
    words += [word for setting in settings for word in ("--set", setting)]
    events, until = recipe.parent / "run" / "events.jsonl", time.monotonic() + WAIT_SECONDS
    with subprocess.Popen(
        [*launcher, "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while (events.read_text() if events.exists() else "").count("StepFinished") < 3:
            if process.poll() is not None or time.monotonic() > until:
                process.terminate()
                pytest.fail(f"no steps were done: {process.communicate()}")
            time.sleep(0.05)
        ranks = [
            each for each in psutil.Process(process.pid).children() if "RANK" in each.environ()
        ]
        (one,) = [each for each in ranks if each.environ()["RANK"] == str(rank)]
        one.send_signal(number)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1, err
    assert not any(each.is_running() for each in ranks)
    return err


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("herder", signal.SIGSTOP), ("herder", signal.SIGKILL), ("torchrun", signal.SIGKILL)],
)
def test_the_rank_that_hung_or_was_killed_is_told_from_files_alone(
    launcher: str, number: signal.Signals, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = fail_in_a_step(recipe, LAUNCHERS[launcher], number, "observe.trace_collectives=true")
    assert "rank 1: dp 1: " in err, "the run itself named it"
    told, text = report(recipe, capsys)
    assert told["ended"] is None
    assert told["step"] >= 3
    found = told["collectives"]
    assert (found["cause"], found["ranks"]) == ("silent", [1])
    call = found["call"]
    assert (call["name"], call["axis"]) == ("all_reduce", "dp")
    assert call["step"] >= told["step"]
    assert call["sequence"] > 9
    first, second = found["standings"]
    assert (first["ending"]["kind"], second["ending"]) == ("collective", None)
    assert text.splitlines()[3].startswith("rank 1 (dp 1) is hung or gone without a word, in step ")
    # Cut in the middle of its last line, and without the file at all.
    path = recipe.parent / "run" / "collectives" / "rank-00001.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert report(recipe, capsys)[0]["collectives"]["ranks"] == [1]
    path.unlink()
    assert report(recipe, capsys)[0]["collectives"]["ranks"] == [1]


@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("axis", "setting"),
    [("tp", "layout.tensor_parallel_size=2"), ("pp", "layout.pipeline_parallel_size=2")],
)
def test_one_of_four_ranks_is_named_though_each_meets_only_some_of_the_others(
    axis: str, setting: str, number: signal.Signals, recipe: Path
) -> None:
    """Within the time-out that was asked for: that of torch's groups is 30 minutes."""
    four = ("cluster.gpus_per_node=4", "model.config.num_hidden_layers=2", setting)
    err = fail_in_a_step(recipe, LAUNCHERS["herder"], number, *four, rank=3)
    place = f"dp 1, {axis} 1" if axis == "tp" else f"{axis} 1, dp 1"
    assert f"herder: rank 3: {place}: " in err
    assert "in step " in err
    told = "killed by SIGKILL" if number == signal.SIGKILL else "did not come to meet the others in"
    assert told in err


def test_a_run_that_ended_well_is_told_so_with_collectives_or_without(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*HERDER, "train", str(recipe), "--set", "train.steps=2"]
    subprocess.run([*words, "--set", "observe.trace_collectives=true"], check=True)
    told, text = report(recipe, capsys)
    assert (told["ended"], told["step"]) == ("finished", 2)
    assert (told["collectives"]["cause"], told["collectives"]["ranks"]) == ("none", [])
    assert "All ranks ended when all was done." in text
    shutil.rmtree(recipe.parent / "run" / "collectives")
    told, text = report(recipe, capsys)
    assert told["collectives"] is None
    assert "--set observe.trace_collectives=true names the rank" in text
