"""A load test as people read it: a table, a line about the plan, a picture (SVG)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from herder.checkpoint.source import ModelSource
from herder.config.catalog import cluster_gpu
from herder.config.run import ClusterConfig
from herder.families.registry import family_named
from herder.plan.serving import ServingPlan, plan_serving
from herder.plan.weight_format import published_format
from herder.serve.loadtest import LoadResult
from herder.units import format_gb, format_seconds

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 640, 200, 70, 30, 70


def load_table(results: Sequence[LoadResult], *, model: str) -> Table:
    """One row a load."""
    table = Table(title=f"{model}: one row a load", box=SIMPLE_HEAD)
    table.add_column("load", no_wrap=True)
    for name in ("errors", "prompt", "output", "tokens/s", "first token", "a token", "memory"):
        table.add_column(name, justify="right", no_wrap=name == "errors")
    for each in results:
        at_once = each.concurrency is not None
        load = f"{each.concurrency} at once" if at_once else f"{each.offered_per_second:g}/s"
        table.add_row(
            load,
            ", ".join(f"{count} {why}" for why, count in each.errors.items()) or "none",
            f"{each.prompt_tokens_mean:,.0f}",
            f"{each.completion_tokens_mean:,.0f}",
            f"{each.output_tokens_per_second:,.1f}",
            _two(each.first_token_seconds_p50, each.first_token_seconds_p99),
            _two(each.token_seconds_p50, each.token_seconds_p99),
            "-" if each.server_peak_bytes is None else format_gb(each.server_peak_bytes),
        )
    table.caption = (
        "prompt and output: tokens, on average; first token, a token: median, 99th percentile"
    )
    return table


def plan_of(source: ModelSource, cluster: ClusterConfig, context: int | None) -> ServingPlan:
    """How a model is planned to be served with windows of `context` tokens."""
    rules = family_named(source.family).weight_rules(source.architecture)
    published = published_format(source.config_json, rules, where=source.name)
    return plan_serving(
        source.architecture,
        cluster,
        model=source.name,
        context_tokens=context,
        published=published,
    )


def plan_line(results: Sequence[LoadResult], plan: ServingPlan | None) -> str:
    """What the plan holds at once, beside what was tried."""
    if plan is None:
        return "plan: none, since the server's model is not in the catalog"
    tried = max((each.concurrency or 0 for each in results), default=0)
    beside = f"{tried} at once were tried" if tried else "the load came as requests a second"
    cluster = plan.cluster
    return (
        f"plan: {plan.max_concurrent_sequences:,} sequences of {plan.context_tokens:,} tokens at "
        f"once on {cluster.nodes * cluster.gpus_per_node} x {cluster_gpu(cluster).name}; {beside}"
    )


def load_plot(results: Sequence[LoadResult], *, model: str) -> str:
    """An SVG document: tokens a second and seconds to the first token, over the load."""
    at_once = results[0].concurrency is not None
    across = [each.concurrency or each.offered_per_second or 0.0 for each in results]
    shapes = [
        _text(_LEFT, 18, model),
        *_panel(_TOP, across, "tokens a second", [_curve(results, "output_tokens_per_second")]),
        *_panel(
            _TOP + _HEIGHT + _GAP,
            across,
            "seconds to the first token (median, and 99th percentile dashed)",
            [_curve(results, f"first_token_seconds_{which}") for which in ("p50", "p99")],
        ),
    ]
    height = _TOP + 2 * _HEIGHT + _GAP + 60
    label = "requests at once" if at_once else "requests a second"
    shapes.append(_text(_LEFT + _WIDTH / 2, height - 14, label, anchor="middle"))
    width = _LEFT + _WIDTH + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _two(median: float | None, tail: float | None) -> str:
    if median is None or tail is None:
        return "-"
    return f"{format_seconds(median)}, {format_seconds(tail)}"


def _curve(results: Sequence[LoadResult], field: str) -> list[float | None]:
    return [getattr(each, field) for each in results]


def _panel(
    top: float, across: Sequence[float], title: str, curves: Sequence[Sequence[float | None]]
) -> list[str]:
    """Curves over one axis that begins at 0, with their largest value and every load marked."""
    most = max((value for curve in curves for value in curve if value is not None), default=0) or 1
    widest = max(across) or 1

    def x(value: float) -> float:
        return _LEFT + _WIDTH * value / widest

    def y(value: float) -> float:
        return top + 20 + (_HEIGHT - 20) * (1 - value / most)

    bottom = y(0)
    shapes = [
        _text(_LEFT, top + 12, title),
        f'<path d="M{_LEFT} {y(most):g}V{bottom:g}H{_LEFT + _WIDTH}" fill="none" stroke="#999"/>',
        *(
            _text(_LEFT - 6, y(mark) + 4, f"{mark:.3g}", anchor="end")
            for mark in (0, most / 2, most)
        ),
        *(_text(x(value), bottom + 16, f"{value:g}", anchor="middle") for value in across),
    ]
    for number, curve in enumerate(curves):
        points = [(x(a), y(b)) for a, b in zip(across, curve, strict=True) if b is not None]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dashes = ' stroke-dasharray="5 4"' if number else ""
        shapes.append(f'<polyline points="{line}" fill="none" stroke="#1f5fa8"{dashes}/>')
        shapes += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="#1f5fa8"/>' for a, b in points]
    return shapes


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    shown = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{shown}</text>'
