from __future__ import annotations

import math
from typing import Any

import pytest

from herder.config.strict_yaml import read_yaml
from herder.errors import ConfigError


def value(text: str) -> Any:
    return read_yaml(text, where="recipe.yaml")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        ("3.0e-4", 3e-4),
        (".5", 0.5),
        ("-2.", -2.0),
        ("65_536", 65_536),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, a]", [1, "a"]),
    ],
)
def test_plain_values_are_what_they_look_like(text: str, expected: Any) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "no", "none", "2026-11-30", "12:30:45", "010", "0x1F", "1e", "e5"]
)
def test_words_stay_words(text: str) -> None:
    assert value(text) == text


def test_infinity_is_a_number() -> None:
    assert math.isinf(value(".inf"))


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.yaml:4: a\.b is given twice, first in line 2"):
        value("a:\n  b: 1\n  c: 2\n  b: 3\n")


@pytest.mark.parametrize("text", ["a: [1", "a: 'b", "a: b: c", "- 1\na: 2", "a: 1\n---\nb: 2\n"])
def test_what_is_no_yaml_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.yaml(:\d+)?: this is not valid YAML: "):
        value(text)


def test_a_list_that_holds_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml: a list or mapping in it holds itself"):
        read_yaml("a: &x [*x]\n", where="r.yaml")


def test_code_is_not_run() -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        value("a: !!python/object/apply:os.getcwd []")


def test_lines_are_known_for_every_key() -> None:
    _, lines = read_yaml("a:\n  b: 1\n\n  c: [x, {d: 2}]\n", where="recipe.yaml")
    assert lines[("a",)] == 1
    assert lines["a", "b"] == 2
    assert lines["a", "c", "1", "d"] == 4


def test_anchors_and_merges_work() -> None:
    text = "base: &base {x: 1}\nmore:\n  <<: *base\n  y: 2\n"
    assert value(text)["more"] == {"x": 1, "y": 2}
