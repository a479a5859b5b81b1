"""What import-linter cannot see: what really gets imported, and names inside external packages."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "herder"
HEAVY = ("torch", "transformers", "fastapi", "openai", "tensorboard")

TORCH_FREE = ("config", "families", "plan", "checkpoint/source.py", "errors.py", "units.py")


def imported_by(statement: str) -> set[str]:
    """Top-level names in sys.modules after a fresh interpreter ran the statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def module_names(*parts: str) -> list[str]:
    """Dotted names of all modules below these packages and files of herder."""
    files = [
        path
        for part in parts
        for path in (
            [SOURCE / part] if part.endswith(".py") else sorted((SOURCE / part).rglob("*.py"))
        )
    ]
    return [
        "herder." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in files
        if path.name != "__init__.py"
    ]


def test_the_stages_before_the_model_import_no_torch() -> None:
    names = module_names(*TORCH_FREE)
    loaded = imported_by("import " + ", ".join(names))
    assert loaded.isdisjoint(HEAVY)


def test_help_lists_the_verbs_without_importing_them() -> None:
    loaded = imported_by(
        "from click.testing import CliRunner\n"
        "from herder.cli.main import command\n"
        "assert 'plan' in CliRunner().invoke(command, ['--help']).output"
    )
    assert loaded.isdisjoint({*HEAVY, "pydantic", "rich", "yaml"})


def test_checkpoints_are_listed_verified_and_pruned_without_torch() -> None:
    verbs = ", ".join(f"herder.cli.checkpoint_{verb}" for verb in ("list", "verify", "prune"))
    assert imported_by(f"import {verbs}").isdisjoint(HEAVY)


def forbidden_in_model(tree: ast.Module) -> list[str]:
    """Uses of process groups, devices and the environment."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("torch.distributed", "torch.cuda", "os.environ")
        )
        or (
            isinstance(node, ast.Import | ast.ImportFrom)
            and any(
                word in ast.unparse(node)
                for word in ("torch.distributed", "torch.cuda", "environ", "import distributed")
            )
        )
    ]


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "model").glob("*.py")), ids=lambda path: path.name
)
def test_the_model_knows_no_process_group_device_or_environment(path: Path) -> None:
    assert forbidden_in_model(ast.parse(path.read_text())) == []


def test_the_guard_sees_each_forbidden_form() -> None:
    forms = [
        "import torch.distributed",
        "from torch import distributed",
        "torch.cuda.synchronize()",
        "os.environ['A']",
    ]
    assert [len(forbidden_in_model(ast.parse(form))) for form in forms] == [1, 1, 1, 1]
