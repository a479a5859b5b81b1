"""The size and shape limits of the product, counted. Raising one takes a decision record."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "herder"
MODULES = sorted(SOURCE.rglob("*.py"))

MAX_PRODUCT_LINES = 34_000
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_VERB_LINES = 80
MAX_SUPPRESSIONS = 20
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "misc"}
SUPPRESSION = re.compile(r"#\s*(type:\s*ignore|pyrefly:\s*ignore|noqa)|pragma:\s*no cover")


def each_module(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(SOURCE)))


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def defects_of_public_names(tree: ast.Module) -> list[str]:
    """Top-level public functions and classes that have no docstring."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]


def test_the_product_stays_under_its_budget_of_lines() -> None:
    assert sum(map(num_lines, [*MODULES, *SOURCE.rglob("*.cpp")])) < MAX_PRODUCT_LINES


@each_module(MODULES)
def test_a_file_stays_short(path: Path) -> None:
    is_verb = path.parent.name == "cli" and path.name != "main.py"
    assert num_lines(path) < (MAX_VERB_LINES if is_verb else MAX_FILE_LINES)


@each_module(MODULES)
def test_functions_stay_short(path: Path) -> None:
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert {name: n for name, n in lengths.items() if n >= MAX_FUNCTION_LINES} == {}


@each_module(MODULES)
def test_a_module_says_what_it_owns_and_public_names_what_they_do(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    assert defects_of_public_names(tree) == []


@each_module([path for path in MODULES if path.name == "__init__.py"])
def test_a_package_is_only_a_docstring(path: Path) -> None:
    assert [type(node) for node in ast.parse(path.read_text()).body] == [ast.Expr]


def test_no_module_has_a_name_that_says_nothing() -> None:
    names = {part for path in MODULES for part in path.relative_to(SOURCE).with_suffix("").parts}
    assert names & EMPTY_NAMES == set()


def test_suppressions_stay_few() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in MODULES
        for line in path.read_text().splitlines()
        if SUPPRESSION.search(line)
    ]
    assert len(found) < MAX_SUPPRESSIONS, "\n".join(found)
