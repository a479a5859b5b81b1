"""`herder checkpoint`: what is told of good, damaged and tainted checkpoints, and what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from herder.checkpoint.directory import checkpoint_path, list_checkpoints, locked, step_of
from herder.checkpoint.run import CheckpointWriter, TrainTensors
from herder.checkpoint.verdict import Verdict
from herder.cli.main import run
from herder.config.run import CheckpointConfig
from tests.tiny import meta_at, progress_at


def save(
    directory: Path, step: int, verdict: Verdict, *, config: dict[str, Any] | None = None
) -> Path:
    made = torch.Generator().manual_seed(7)
    model = {"embed.weight": torch.randn(6, 4, generator=made), "norm.weight": torch.ones(4)}
    model["embed.weight"][2, 1] = float(step)
    state = TrainTensors(
        model=model, optimizer={"exp_avg.embed.weight": torch.zeros(6, 4)}, is_part=False
    )
    meta = meta_at(step, {})
    begun = CheckpointWriter(state).save(
        directory,
        state,
        progress=progress_at(step),
        meta=meta if config is None else meta.model_copy(update={"config": config}),
        model_files={},
        policy=CheckpointConfig(keep_last=9),
        verdict=verdict,
    )
    return begun.result().path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    save(tmp_path / "run", 10, Verdict(held_out_loss=2.5))
    save(tmp_path / "run", 20, Verdict())
    save(tmp_path / "run", 30, Verdict(tainted="loss 9 at step 30 is over 3"))
    (tmp_path / "run" / "experiment_meta.json").write_text(meta_at(0, {}).model_dump_json())
    return tmp_path / "run"


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """The one object on stdout."""
    return json.loads(capsys.readouterr().out)


def test_list_says_what_is_whole_damaged_and_tainted(runs: Path, capsys) -> None:
    assert run(["checkpoint", "list", str(runs), "--json"]) == 0
    found = told(capsys)["checkpoints"]
    assert [(x["step"], x["kind"], x["state"]) for x in found] == [
        (10, "full", "whole"),
        (20, "full", "whole"),
        (30, "full", "tainted"),
    ]
    assert found[0]["held_out_loss"] == 2.5
    assert found[0]["num_bytes"] > 200
    (checkpoint_path(runs, 20) / "model.safetensors").write_bytes(b"short")
    assert run(["checkpoint", "list", str(runs)]) == 1
    text = capsys.readouterr().out
    assert "damaged: model.safetensors has 5 bytes of" in " ".join(text.split())
    assert "tainted: loss 9 at step 30" in " ".join(text.split())


def test_verify_reads_contents_and_names_each_damaged_file(runs: Path, capsys) -> None:
    assert run(["checkpoint", "verify", str(runs)]) == 0
    for name in ("model", "optimizer"):
        path = checkpoint_path(runs, 20) / f"{name}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capsys.readouterr()
    assert run(["checkpoint", "list", str(runs)]) == 0, "lengths are as they were"
    capsys.readouterr()
    assert run(["checkpoint", "verify", str(runs), "--json"]) == 1
    assert told(capsys)["checkpoints"][1]["damage"] == [
        "model.safetensors has another sha256 than when it was written",
        "optimizer.safetensors has another sha256 than when it was written",
    ]
    assert run(["checkpoint", "verify", str(checkpoint_path(runs, 10))]) == 0


def test_prune_says_what_it_deletes_and_first_only_says_so(runs: Path, capsys) -> None:
    words = ["checkpoint", "prune", str(runs), "--keep-last", "1", "--json"]
    assert run([*words, "--dry-run"]) == 0
    planned = told(capsys)
    assert planned["deleted"] == [str(checkpoint_path(runs, 10))]
    assert len(list_checkpoints(runs)) == 3
    assert run(words) == 0
    assert told(capsys) == {**planned, "dry_run": False}
    assert [step_of(path) for path in list_checkpoints(runs)] == [20, 30]


def test_prune_leaves_a_run_alone_that_is_training(runs: Path, capsys) -> None:
    with locked(runs):
        assert run(["checkpoint", "prune", str(runs), "--keep-last", "1"]) == 2
    assert "another process" in capsys.readouterr().err
    assert len(list_checkpoints(runs)) == 3


def test_diff_finds_the_one_value_and_the_one_key_that_differ(runs: Path, capsys) -> None:
    a = str(checkpoint_path(runs, 10))
    assert run(["checkpoint", "diff", a, a]) == 0
    assert "0 of 3 tensors differ" in capsys.readouterr().out
    other = save(runs.parent / "other", 20, Verdict(), config={"train": {"seed": 7}})
    assert run(["checkpoint", "diff", a, str(other), "--json"]) == 1
    found = told(capsys)
    assert found["same"] is False
    assert found["config"]["train.seed"][1] == 7
    (tensor,) = found["tensors"]
    assert tensor == {
        "name": "embed.weight",
        "num_differing": 1,
        "num_values": 24,
        "largest_absolute": 10.0,
        "largest_relative": 0.5,
    }
    assert run(["checkpoint", "diff", a, str(runs)]) == 1
    text = capsys.readouterr().out
    assert f"B {checkpoint_path(runs, 20)}" in text, "the tainted one is not what a run stands for"
    assert "1 of 24" in text
