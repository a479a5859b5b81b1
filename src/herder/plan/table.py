"""Plans as tables and bars for people. Owns how a plan looks; the figures are the plan's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from herder.config.catalog import cluster_gpu
from herder.plan.facts import (
    MODULE_COLUMNS,
    memory_parts,
    module_rows,
    told_cluster,
    told_size,
    training_facts,
)
from herder.plan.serving import RULE_MEMORY_SHARE, ServingPlan
from herder.plan.training import TrainingPlan
from herder.units import GB, format_count, format_gb, format_seconds

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_MAX_REJECTED = 8


class StackedBar:
    """One bar as wide as the console, a colour a part; what is left of `whole` stays dotted."""

    def __init__(self, parts: Mapping[str, float], whole: float) -> None:
        self.parts = parts
        self.whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Whole cells by cumulative rounding, so that the widths add up."""
        width = min(options.max_width, 100)
        done, seen = 0, 0.0
        for value, color in zip(self.parts.values(), _COLORS, strict=False):
            seen += value
            until = min(width, round(seen / self.whole * width))
            yield Segment("█" * (until - done), Style(color=color))
            done = max(done, until)
        yield Segment("·" * (width - done), Style(dim=True))
        yield Segment.line()


def _bar(
    heading: str, told: str, parts: Mapping[str, float], whole: float, show: Callable[[float], str]
) -> Iterator[RenderableType]:
    """A heading, the bar, and what each of its colours stands for."""
    legend = Text()
    for (name, value), color in zip(parts.items(), _COLORS, strict=False):
        legend.append("■ ", style=color)
        legend.append(f"{name} {show(value)}   ")
    yield Text.assemble((f"\n{heading}  ", "bold"), told)
    yield StackedBar(parts, whole)
    yield legend


def _rows(rows: Iterable[tuple[str, str]], heading: str = "") -> Iterator[RenderableType]:
    """Names and values side by side, under a heading; nothing where there are no rows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    if heading and table.row_count:
        yield Text(f"\n{heading}", style="bold")
    if table.row_count:
        yield table


def _title(kind: str, plan: TrainingPlan | ServingPlan) -> Text:
    counted = f"  {format_count(plan.parameters)} parameters"
    if plan.active_parameters != plan.parameters:
        counted += f", {format_count(plan.active_parameters)} active"
    return Text.assemble((f"{kind}: {plan.model}", "bold"), (counted, "dim"), "\n")


def print_plan(plan: TrainingPlan | ServingPlan) -> None:
    """Shows a plan on the terminal."""
    is_training = isinstance(plan, TrainingPlan)
    Console().print(training_table(plan) if is_training else serving_table(plan))


def training_table(plan: TrainingPlan) -> Group:
    """A training plan: what was chosen, where parameters, FLOPs, memory and time go."""
    memory, total = plan.memory_gb, plan.step_time_seconds.total
    filled = (
        f"{format_gb(memory.total * GB)} of {told_size(memory.device)}, "
        f"{format_gb(memory.budget * GB)} may be filled; 16N rule: {format_gb(memory.state * GB)} "
        f"of state, largest rank {format_gb(memory.largest_rank_state * GB)}"
    )
    rejected = [(entry.layout, entry.reason) for entry in plan.rejected[:_MAX_REJECTED]]
    if len(plan.rejected) > _MAX_REJECTED:
        rejected.append(("", f"and {len(plan.rejected) - _MAX_REJECTED} more"))
    modules = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    modules.add_column(MODULE_COLUMNS[0], no_wrap=True)
    for name in MODULE_COLUMNS[1:]:
        modules.add_column(name, justify="right")
    for row in module_rows(plan):
        modules.add_row(*row, style="bold" if row[0] == "total" else None)
    return Group(
        _title("Training plan", plan),
        *_rows(training_facts(plan)),
        Text(),
        modules,
        *_bar("Memory", filled, memory_parts(plan), memory.device, _told_gb),
        *_bar(
            "Step time",
            f"{format_seconds(total)}, simulated",
            _slowest_parts(plan),
            total,
            lambda seconds: f"{seconds / total:.0%}",
        ),
        *_rows(rejected, "Rejected"),
        *_rows((("-", line) for line in plan.adjustments), "Adjusted"),
    )


def _told_gb(gb: float) -> str:
    return format_gb(gb * GB)


def _slowest_parts(plan: TrainingPlan) -> dict[str, float]:
    """Parts of a step of half a percent and more, the longest first, and the rest as one."""
    parts = plan.step_time_seconds.model_dump()
    total = parts.pop("total")
    ranked = sorted(parts.items(), key=lambda part: -part[1])[: len(_COLORS) - 1]
    kept = {name.replace("_", " "): value for name, value in ranked if value >= 0.005 * total}
    return {**kept, "rest": total - sum(kept.values())}


def serving_table(plan: ServingPlan) -> Group:
    """A serving plan: the split, where a GPU's memory goes, what it holds at once."""
    memory_gb = cluster_gpu(plan.cluster).memory_gb
    filled = (
        f"{format_gb(plan.budget_gb_per_gpu * GB)} of {told_size(memory_gb)} a GPU "
        f"({plan.utilization:.0%}); the rest is the engine's"
    )
    parts = {"weights": plan.weights_gb_per_gpu, "KV cache": plan.kv_cache_gb_per_gpu}
    return Group(
        _title("Serving plan", plan),
        *_rows(_serving_facts(plan)),
        *_bar("Memory", filled, parts, memory_gb, _told_gb),
        *_rows((("-", note) for note in plan.notes), "Notes"),
    )


def _serving_facts(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    layout, context = plan.layout, f"{plan.context_tokens:,}"
    yield "cluster", told_cluster(plan.cluster)
    degrees = {
        "TP": layout.tensor_parallel_size,
        "EP": layout.expert_parallel_size,
        "PP": layout.pipeline_parallel_size,
    }
    told = [f"{name} {size}" for name, size in degrees.items() if size > 1 or name == "TP"]
    replicas = layout.num_replicas
    told.append(f"{replicas} replica{'s' if replicas > 1 else ''}")
    if layout.data_parallel_size > replicas:
        told.append(f"{layout.data_parallel_size} copies of attention")
    yield "layout", ", ".join(told)
    yield "shape", plan.distribution_shape
    yield "formats", f"{plan.weight_dtype} weights, {plan.kv_cache_dtype} cache"
    yield (
        "cache",
        f"{plan.kv_bytes_per_token_per_gpu:,.0f} bytes a token and GPU, "
        f"{format_gb(plan.kv_gb_per_sequence_per_gpu * GB)} a sequence of {context}",
    )
    yield "holds", f"{plan.max_concurrent_sequences:,} sequences of {context} tokens a replica"
    limit = f"{plan.decode_tokens_per_second_limit:,.0f} tokens/s"
    yield "decode", f"at most {limit} for one sequence (memory bandwidth)"
    gpus = f"{plan.gpus_needed_rule} GPU{'s' if plan.gpus_needed_rule > 1 else ''}"
    yield "quick rule", f"{gpus}: weight bytes / ({RULE_MEMORY_SHARE} x memory)"
