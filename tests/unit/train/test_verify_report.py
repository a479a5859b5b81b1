"""Verdicts of `herder verify`: what passes, what fails, and what is no proof."""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console

from herder.errors import CheckFailedError, PlanError
from herder.train.verify_report import (
    TOLERANCES,
    Cell,
    Report,
    report_json,
    report_notes,
    report_table,
)

FINE = Cell(
    layout="fsdp=2,zero=1",
    ranks=2,
    max_relative_loss_difference=1e-7,
    max_relative_norm_difference=1e-7,
    max_gradient_difference=1e-6,
    worst_parameter="layers.0.attention.key.weight",
    max_parameter_difference=1e-6,
)
REFUSED = Cell(layout="cp=2", ranks=2, refused="cp=2: context parallelism cannot be run yet.")
DIED = Cell(layout="dp=2", ranks=2, error="rank 1: ended by SIGKILL")


def report(*cells: Cell, losses: tuple[float, ...] = (4.0, 3.0)) -> Report:
    return Report(model="small", losses=losses, cells=cells)


def test_within_all_tolerances_is_equal() -> None:
    assert FINE.passed
    assert not FINE.failed
    assert report(FINE, REFUSED).problem is None


@pytest.mark.parametrize("field", [name for name in vars(FINE) if name.startswith("max_")])
@pytest.mark.parametrize("value", [1.0, math.nan, None])
def test_one_difference_over_its_tolerance_fails(field: str, value: float | None) -> None:
    cell = Cell(**{**vars(FINE), field: value})
    assert cell.failed
    assert "small is not the same model under fsdp=2,zero=1" in str(report(cell).problem)


def test_what_was_refused_neither_passed_nor_failed() -> None:
    assert not REFUSED.passed
    assert not REFUSED.failed


def test_when_all_were_refused_nothing_is_proven() -> None:
    with pytest.raises(PlanError, match=r"nothing was compared\.\ncp=2: refused"):
        report(REFUSED).check()
    with pytest.raises(CheckFailedError, match="not the same model under dp=2"):
        report(REFUSED, DIED).check()
    report(REFUSED, FINE).check()


def test_a_rank_that_died_failed() -> None:
    assert DIED.failed
    assert report_notes(report(DIED)) == ["dp=2: FAILED. rank 1: ended by SIGKILL"]


def test_a_loss_that_does_not_fall_proves_nothing() -> None:
    problem = report(FINE, losses=(4.0, 3.99)).problem
    assert problem is not None
    assert "did not fall (4.0000 to 3.9900)" in problem


def test_json_has_a_row_a_layout_and_no_number_that_is_none() -> None:
    broken = Cell(**{**vars(FINE), "max_gradient_difference": math.nan})
    told = json.loads(json.dumps(report_json(report(FINE, REFUSED, broken)), allow_nan=False))
    assert told["model"] == "small"
    assert [cell["passed"] for cell in told["cells"]] == [True, False, False]
    assert told["cells"][0]["max_relative_loss_difference"] == 1e-7
    assert told["cells"][1]["refused"].startswith("cp=2")
    assert told["cells"][2]["max_gradient_difference"] is None
    assert told["tolerances"].keys() == TOLERANCES.keys()


@pytest.mark.parametrize(("num_columns", "is_named"), [(80, False), (120, True)])
def test_the_matrix_fits_its_terminal(num_columns: int, is_named: bool) -> None:
    console = Console(width=num_columns, record=True, quiet=True)
    long = Cell(**{**vars(FINE), "layout": "fsdp=2,zero=1,tp=2,pp=2,recompute=full"})
    with console.capture() as captured:
        console.quiet = False
        console.print(report_table(report(FINE, long, REFUSED), num_columns=num_columns))
    text = captured.get()
    assert "…" not in text
    assert text.count("equal") == 2
    assert ("layers.0.attention.key.weight" in text) == is_named
    assert "refused" in text
    assert max(map(len, text.splitlines())) <= num_columns


def test_one_reason_is_told_once() -> None:
    again = Cell(layout="cp=2,tp=2", ranks=4, refused=REFUSED.refused)
    notes = report_notes(report(FINE, REFUSED, again))
    assert notes == [f"cp=2 and cp=2,tp=2: refused. {REFUSED.refused}"]
