"""`herder train` with a plan of several ranks: started, stopped, refused, hung, killed, told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from herder.checkpoint.directory import list_checkpoints, step_of
from herder.cli.main import run
from tests.end_to_end.training import HERDER, TORCHRUN, WAIT_SECONDS, Training

LAUNCHERS = {"herder": HERDER, "torchrun": (*TORCHRUN, "--no-python", *HERDER)}


@pytest.mark.parametrize(
    ("number", "rank"), [(signal.SIGTERM, None), (signal.SIGUSR1, 1)], ids=["to all", "to one"]
)
def test_ranks_are_started_stop_when_asked_and_save(
    number: signal.Signals, rank: int | None, recipe: Path
) -> None:
    with Training(recipe) as training:
        training.wait_for_steps(1)
        (training.process if rank is None else training.rank(rank)).send_signal(number)
        out, err = training.finish()
    assert training.process.returncode == 128 + number, err
    assert err.count("parameters on DP 2") == 1, "the plan is shown once"
    asked = f"{number.name}: finishing this step, then saving"
    assert err.count(asked) == (rank is None), "to one rank: it does not speak for all"
    assert f"Go on with:\n  herder train {recipe}\n" in out
    (saved,) = list_checkpoints(training.run_directory)
    assert json.loads((saved / "manifest.json").read_text())
    assert not (training.run_directory / "collectives").exists(), "nobody asked for traces"
    interrupted = training.events("RunInterrupted")[-1]
    assert interrupted["signal"] == number.name
    assert (interrupted["seconds"] or 0.0) < WAIT_SECONDS
    step, again = step_of(saved), ["train", "--resume", str(recipe.parent / "run"), "--set"]
    done = subprocess.run(
        [*HERDER, *again, f"train.steps={step + 1}"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"since step {step}: train.steps 1000000 -> {step + 1}") == 1
    assert run([*again, f"train.steps={step + 2}", "--set", "cluster.gpus_per_node=1"]) == 0
    assert f"since step {step + 1}: 2 x cpu (DP 2, ZeRO-0) -> 1 x cpu (one rank)" in (
        (training.run_directory / "events.jsonl").read_text()
    )


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
    given = ("restart.max_in_a_row=0", "train.collective_timeout_seconds=15", *settings)
    with Training(recipe, *given, launcher=launcher) as training:
        training.wait_for_steps(3)
        training.rank(rank).send_signal(number)
        _, err = training.finish()
    assert training.process.returncode == 1, err
    assert training.rank_processes() == []
    return err


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("herder", signal.SIGSTOP),
        ("herder", signal.SIGKILL),
        pytest.param("torchrun", signal.SIGKILL, marks=pytest.mark.full),
    ],
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
    [
        ("tp", "layout.tensor_parallel_size=2"),
        pytest.param("pp", "layout.pipeline_parallel_size=2", marks=pytest.mark.full),
    ],
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
