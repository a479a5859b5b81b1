"""A parity report as one JSON object and as lines for people. Knows no model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from herder.evaluate.parity import ParityReport


def report_json(report: ParityReport, *, model: str) -> dict[str, Any]:
    """All of the report; keys are its field names, but for `reference`, its origin."""
    figures = asdict(report)
    by_layer = dict(zip(_layer_names(report), report.by_layer, strict=True))
    heading = {"model": model, "reference": figures.pop("origin"), "passed": report.passed}
    return {**heading, **figures, "by_layer": by_layer}


def report_text(report: ParityReport, *, model: str) -> str:
    """What agrees and what does not, with the place to look first."""
    checks = [
        ("logits", report.max_abs_difference, f"against {report.origin}"),
        ("cached", report.cached_max_abs_difference, "token by token, against a whole forward"),
        ("packed", report.packed_max_abs_difference, "with other documents, against alone"),
    ]
    lines = [
        f"{model}: {'passed' if report.passed else 'FAILED'}, tolerance {report.tolerance:.1e}"
    ]
    lines += [
        f"  {name}  {difference:9.2e}  {_verdict(difference, report.tolerance):6}  {what}"
        for name, difference, what in checks
    ]
    verdict = "equal" if report.greedy_equal else "DIFFER"
    lines.append(f"  greedy  {report.greedy_agreement:9.1%}  {verdict:6}  of the tokens agree")
    lines.append(f"  by position  {_by_position(report)}")
    if report.by_layer:
        pairs = zip(_layer_names(report), report.by_layer, strict=True)
        lines.append("  by layer  " + "  ".join(f"{name} {value:.1e}" for name, value in pairs))
    if not report.passed:
        lines.append(_where_to_look(report))
    return "\n".join(lines)


def _verdict(difference: float, tolerance: float) -> str:
    return "equal" if difference <= tolerance else "DIFFER"


def _by_position(report: ParityReport) -> str:
    """Every position for short rows, else the first, some between and the last."""
    count = len(report.by_position)
    places = sorted({*range(0, count, max(1, count // 8)), count - 1, report.worst_position})
    return "  ".join(f"{place}: {report.by_position[place]:.1e}" for place in places)


def _where_to_look(report: ParityReport) -> str:
    if report.first_differing_layer:
        return f"  first to differ: {report.first_differing_layer}"
    if report.max_abs_difference > report.tolerance:
        agrees = f"hidden states of row 0 agree; see row {report.worst_row}"
        return f"  worst: row {report.worst_row}, position {report.worst_position} ({agrees})"
    return "  logits agree: look at what the cache or the packing changes"


def _layer_names(report: ParityReport) -> list[str]:
    """The embedding, the layers whose output is seen, and the norm after the last one."""
    if not report.by_layer:
        return []
    return ["embed", *(f"layers.{index}" for index in range(len(report.by_layer) - 2)), "norm"]
