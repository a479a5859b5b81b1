"""What scripts rely on: exit statuses, `--json`, and no verb listed that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import herder.cli.main
from herder.cli.main import VERBS, run

CLI = Path(herder.cli.main.__file__).parent

NOT_A_MODEL = [
    ["plan", "train", "llama-9-7b"],
    ["plan", "serve", "llama-9-7b"],
    ["evaluate", "llama-9-7b"],
    ["generate", "llama-9-7b", "--prompt", "x"],
    ["serve", "llama-9-7b"],
    ["convert", "llama-9-7b", "target"],
    ["parity", "llama-9-7b"],
    ["verify", "llama-9-7b"],
    ["report", "no_such_run"],
    ["checkpoint", "list", "no_such_run"],
    ["checkpoint", "verify", "no_such_run"],
    ["checkpoint", "prune", "no_such_run"],
    ["checkpoint", "diff", "no_such_run", "no_such_run"],
    ["train", "no_such_recipe.yaml"],
    ["train", "--resume", "no_such_run"],
]

JSON_LINES = [
    "plan train llama-2-7b --nodes 1 --gpus-per-node 8 --gpu h100-80gb --json",
    "plan train llama-3.1-405b --nodes 2048 --gpus-per-node 8 --gpu h100-80gb --json",
    "plan serve llama-2-7b --gpus-per-node 8 --gpu h100-80gb --context 8192 --json",
]


def test_the_listed_verbs_are_the_files() -> None:
    defines_command = re.compile(r"^(def command\b|command\b.*=)", re.MULTILINE)
    files = {path.stem for path in CLI.glob("*.py") if defines_command.search(path.read_text())}
    assert files - {"main"} == set(VERBS)


@pytest.mark.parametrize("words", NOT_A_MODEL, ids=" ".join)
def test_what_does_not_exist_is_the_users_mistake(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words[-1] in captured.err or "llama-9-7b" in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == [], "a refused command left something behind"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a RECIPE, for example recipes/debug.yaml, or --resume RUN"),
        (["r.yaml", "--resume", "runs/a"], "RECIPE r.yaml and --resume runs/a: give one of them"),
    ],
)
def test_training_takes_a_recipe_or_a_run(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", JSON_LINES)
def test_json_is_one_object_and_nothing_else(line: str, capsys) -> None:
    assert run(line.split()) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys) -> None:
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: herder {verb}")
    assert len(text.splitlines()) > 5
