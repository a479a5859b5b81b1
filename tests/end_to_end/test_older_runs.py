"""Runs of older versions go on: their configs load, and they learn what they would have learned.

tests/data/first_version was written by the first commit that could train, 5064d26, on one thread:
`herder train recipe.yaml` for 12 steps, with a checkpoint after 6; the one after 12 was deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from herder.checkpoint.metadata import config_hash, read_meta
from herder.cli.main import run
from herder.config.load import load_run_config
from herder.observe.events import Event, Notice, RunFinished, StepFinished
from herder.observe.sinks import read_events

RUN = "run"


@pytest.fixture
def first_version(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_cache: Callable[[Path, pytest.MonkeyPatch], None],
) -> Path:
    """A folder with the run of the first version, its text and its tokenizer, to work in."""
    folder = tmp_path / "work"
    shutil.copytree(repository / "tests/data/first_version", folder)
    monkeypatch.chdir(folder)
    fresh_cache(tmp_path / "cache", monkeypatch)
    return folder


def losses(directory: str) -> dict[int, float]:
    return {event.step: event.loss for event in told(directory) if isinstance(event, StepFinished)}


def told(directory: str) -> list[Event]:
    return list(read_events(Path(directory) / "events.jsonl"))


def test_a_run_of_the_first_version_goes_on_to_the_losses_of_an_unbroken_one(
    first_version: Path,
) -> None:
    of_the_first_version = losses(RUN)
    (first_version / RUN / "events.jsonl").unlink()
    assert run(["train", "--resume", RUN]) == 0
    assert sorted(losses(RUN)) == [7, 8, 9, 10, 11, 12]
    assert isinstance(told(RUN)[-1], RunFinished)
    (changed,) = [event.message for event in told(RUN) if isinstance(event, Notice)]
    assert changed.startswith("changed since step 6: herder commit 5064d26a52 -> ")
    assert run(["train", f"{RUN}/config.yaml", "--set", "run_directory=unbroken"]) == 0
    unbroken = losses("unbroken")
    after = {step: unbroken[step] for step in range(7, 13)}
    assert losses(RUN) == pytest.approx(after, rel=1e-6), "kernels have changed since: one rounding"
    assert unbroken == pytest.approx(of_the_first_version, rel=1e-6)


def test_keys_that_are_younger_than_a_run_have_their_defaults(first_version: Path) -> None:
    saved = read_meta(first_version / RUN)
    config = load_run_config(first_version / RUN / "config.yaml").model_dump(mode="json")
    assert saved.config == config
    assert saved.config["train"]["collective_timeout_seconds"] == 600
    assert config_hash(saved.config) == config_hash(config)


def test_what_an_older_run_was_made_of_may_still_not_change(
    first_version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_version
    assert run(["train", f"{RUN}/config.yaml", "--set", "train.gradient_dtype=bf16"]) == 2
    assert "train.gradient_dtype: None there, 'bf16' now" in capsys.readouterr().err


def test_a_run_of_the_first_version_is_a_model(
    first_version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_version
    assert run(["generate", RUN, "--prompt", "herd", "--max-tokens", "2", "--json"]) == 0
    assert '"completion_tokens": 2' in capsys.readouterr().out
