"""`herder verify` as a user runs it: before spending money."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from herder.cli.main import run
from herder.train.verify_report import TOLERANCES


def verified(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert run(["verify", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_model_is_the_same_in_the_layouts_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ["tp=2", "fsdp=2,zero=1", "dp=2,ep=2"]
    told = verified(capsys, "llama-debug", "--layouts", *layouts, "--steps", "3")
    assert told["model"] == "llama-debug"
    assert told["losses"][-1] < told["losses"][0]
    assert [cell["layout"] for cell in told["cells"]] == layouts
    for cell in told["cells"][:2]:
        assert cell["passed"]
        assert cell["ranks"] == 2
        assert cell["max_relative_loss_difference"] < 1e-5
    assert told["cells"][2]["passed"] is False
    assert "expert_parallel_size=2" in told["cells"][2]["refused"]


def test_a_recipe_is_verified_by_its_model(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(repository / "recipes" / "debug.yaml")
    assert run(["verify", recipe, "--layouts", "dp=2", "--layouts", "recompute=full"]) == 0
    out = capsys.readouterr().out
    assert out.count("equal") == 2
    assert "llama from model.config: 5 steps" in out


def test_the_very_plan_is_scaled_down_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--nodes", "2048", "--gpus-per-node", "8", "--gpu", "h100-80gb"]
    assert run(["verify", "llama-3.1-405b", "--plan", *cluster, "--steps", "3", "--json"]) == 0
    captured = capsys.readouterr()
    (cell,) = json.loads(captured.out)["cells"]
    assert cell["ranks"] == 8
    assert cell["passed"]
    assert "TP 8, PP 4, DP 512, ZeRO-1 on 16,384 ranks" in captured.err
    assert f"Run here as {cell['layout']}" in captured.err


def test_a_cell_over_its_tolerance_is_exit_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOLERANCES, "norm", (0.0, "of nothing"))
    monkeypatch.setitem(TOLERANCES, "loss", (-1.0, "of nothing"))
    assert run(["verify", "llama-debug", "--layouts", "tp=2", "--steps", "2"]) == 1
    captured = capsys.readouterr()
    assert "tp=2: FAILED by loss and norm" in captured.out
    assert "llama-debug is not the same model under tp=2." in captured.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["llama-debug", "--layouts", "tq=2"], "For example tp=2,pp=2"),
        (["llama-debug", "--layouts", "fdsp=2"], "Did you mean 'fsdp'"),
        (["llama-debug", "--nodes", "2"], "give --plan too"),
        (["llama-debgu", "--layouts", "tp=2"], "Did you mean 'llama-debug'"),
        (["no_such.yaml"], "no such recipe"),
        (["llama-debug", "--steps", "1"], "1 is not in the range"),
    ],
)
def test_a_users_mistake_is_told_at_once(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert "Traceback" not in captured.err


def test_when_every_layout_is_refused_nothing_is_proven(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["verify", "llama-debug", "--layouts", "tp=3", "dp=2,ep=2"]) == 2
    assert "nothing was compared" in capsys.readouterr().err
