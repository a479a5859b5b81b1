"""The command line as a shell sees it: exit statuses, streams and suggestions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from herder.cli.main import QUESTIONS, VERBS, command, run

HERDER = [sys.executable, "-c", "from herder.cli.main import main; main()"]


def test_a_mistyped_verb_is_refused_with_the_nearest_one(capsys) -> None:
    assert run(["tarin", "recipe.yaml"]) == 2
    captured = capsys.readouterr()
    assert "'train'" in captured.err
    assert captured.out == ""


def test_a_mistyped_option_is_refused_with_the_nearest_one(capsys) -> None:
    assert run(["--versoin"]) == 2
    assert "'--version'" in capsys.readouterr().err


def test_help_names_every_verb_under_its_question(capsys) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for question, verbs in QUESTIONS.items():
        section = text[text.index(question) :]
        assert all(f"\n  {verb} " in section for verb in verbs)


def test_the_version_is_the_packages(capsys) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"herder, version \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_reader_that_went_away_gets_no_traceback() -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    done = subprocess.run([*HERDER, "--help"], stdout=writing_end, stderr=subprocess.PIPE)
    os.close(writing_end)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_without_a_traceback() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*HERDER, "--version"], stdout=full, stderr=subprocess.PIPE)
    assert done.stderr.startswith(b"herder: No space left on device.\n")
    assert b"Traceback" not in done.stderr
    assert done.returncode != 0


def test_without_an_output_at_all_nothing_breaks() -> None:
    shell = 'exec "$@" >&-'
    done = subprocess.run(["sh", "-c", shell, "sh", *HERDER, "--version"], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_name_that_no_file_can_have_is_the_users_mistake(capsys) -> None:
    assert run(["generate", "x" * 300, "--prompt", "a"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_missing_file_that_nobody_named_is_a_bug_and_shows_its_place(monkeypatch) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "inner")

    monkeypatch.setattr(command, "main", broken)
    with pytest.raises(FileNotFoundError):
        run([])


def test_no_verb_is_listed_twice() -> None:
    assert len(set(VERBS)) == len(VERBS)
