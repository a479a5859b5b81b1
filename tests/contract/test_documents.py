"""What the documents show is true: commands parse, cheap ones run, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from herder.cli.main import command, run

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def blocks(language: str) -> list[tuple[Path, str]]:
    """Every fenced block of this language, with its document."""
    return [
        (document, body)
        for document in DOCUMENTS
        for kind, body in BLOCK.findall(document.read_text())
        if kind == language
    ]


def command_lines(program: str) -> list[list[str]]:
    """The argument lists of one program in bash blocks, comments and continuations resolved."""
    lines = [
        shlex.split(line, comments=True)
        for _, body in blocks("bash")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    return [words[1:] for words in lines if words and words[0] == program]


RECIPE_LINES = [
    shlex.split(re.sub(r"\\\n# *", " ", line), comments=True)[1:]
    for recipe in (REPOSITORY / "recipes").glob("*.yaml")
    for line in re.findall(r"^# +(herder (?:.*\\\n# *)*.*)", recipe.read_text(), re.MULTILINE)
]
"""What the comments of recipes tell to run; a line may go on after a backslash."""
HERDER_LINES = [*command_lines("herder"), *RECIPE_LINES]
PLAN_LINES = [words for words in HERDER_LINES if words[0] == "plan"]
TRAIN_LINES = [
    words
    for words in HERDER_LINES
    if words[0] == "train" and words[1] != "--resume" and not words[1].startswith("runs/")
]
"""Of shipped recipes: what goes on from a run needs one."""


def parse(words: list[str]) -> click.Context:
    """Resolve verbs and options as the real command would, without running anything."""
    found: click.Command = command
    context = click.Context(command, info_name="herder")
    while isinstance(found, click.Group):
        name, child, words = found.resolve_command(context, words)
        assert child is not None
        found, context = child, click.Context(child, info_name=name, parent=context)
    return found.make_context(context.info_name, list(words), parent=context.parent)


@pytest.mark.parametrize("words", HERDER_LINES, ids=" ".join)
def test_a_documented_command_parses(words: list[str]) -> None:
    assert parse(words).command.name


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(click.UsageError, match="--gpu-per-node"):
        parse(["plan", "train", "llama-2-7b", "--gpu-per-node", "8"])


@pytest.mark.parametrize("words", PLAN_LINES, ids=" ".join)
def test_a_documented_plan_runs(words: list[str], tmp_path, monkeypatch, capsys) -> None:
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    assert run(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("words", TRAIN_LINES, ids=" ".join)
def test_a_documented_run_can_be_planned(words: list[str], monkeypatch, capsys) -> None:
    monkeypatch.chdir(REPOSITORY)
    cluster = ["--nodes", "1", "--gpus-per-node", "1", "--gpu", "b200"]
    if "cluster:" in Path(words[1]).read_text():
        cluster = []  # the recipe's own
    assert run(["plan", *words, *cluster]) == 0, capsys.readouterr().err


def test_the_documents_show_commands_at_all() -> None:
    assert len(PLAN_LINES) >= 3
    assert len(TRAIN_LINES) > sum(words[0] == "train" for words in RECIPE_LINES) > 3
    assert len(HERDER_LINES) > len(PLAN_LINES)


@pytest.mark.parametrize("words", command_lines("make"), ids=" ".join)
def test_a_documented_make_target_exists(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert set(words) <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize(("document", "body"), blocks("python"))
def test_python_in_a_document_compiles(document: Path, body: str) -> None:
    compile(body, document.name, "exec")
