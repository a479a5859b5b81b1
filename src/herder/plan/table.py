"""Plans as tables and bars for people. Owns how a plan looks; the figures are the plan's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from herder.config.catalog import cluster_gpu
from herder.config.run import ClusterConfig
from herder.plan.search import Rejected
from herder.plan.serving import RULE_MEMORY_SHARE, ServingPlan
from herder.plan.training import TrainingPlan
from herder.units import GB, TFLOP, format_count, format_flops, format_gb, format_seconds

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_MAX_REJECTED = 8
MODULE_NAMES = {
    "feed_forward": "feed-forward",
    "shared_expert": "shared expert",
}
"""`attention` is its projections; `scores` is attention itself, which has no parameters."""


class StackedBar:
    """One bar as wide as the console, a colour a part; what is left of `whole` stays dotted."""

    def __init__(self, parts: Sequence[tuple[str, float]], whole: float) -> None:
        self.parts = parts
        self.whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Whole cells by cumulative rounding, so that the widths add up."""
        width = min(options.max_width, 100)
        done, seen = 0, 0.0
        for (_, value), color in zip(self.parts, _COLORS, strict=False):
            seen += value
            until = min(width, round(seen / self.whole * width))
            yield Segment("█" * (until - done), Style(color=color))
            done = max(done, until)
        yield Segment("·" * (width - done), Style(dim=True))
        yield Segment.line()


def _legend(parts: Sequence[tuple[str, float]], told: Sequence[str]) -> Text:
    text = Text()
    for (name, _), value, color in zip(parts, told, _COLORS, strict=False):
        text.append("■ ", style=color)
        text.append(f"{name} {value}   ")
    return text


def training_table(plan: TrainingPlan) -> Group:
    """A training plan: what was chosen, where parameters, FLOPs, memory and time go."""
    return Group(*_training_parts(plan))


def _training_parts(plan: TrainingPlan) -> Iterator[RenderableType]:
    yield _title(f"Training plan: {plan.model}", plan.parameters, plan.active_parameters)
    yield _pairs(_training_facts(plan))
    yield Text()
    yield _modules(plan)
    yield Text()
    yield from _memory(plan)
    yield Text()
    yield from _step_time(plan)
    yield from _rejected(plan.rejected)
    yield from _bullets("Adjusted", plan.adjustments)


def _title(heading: str, parameters: int, active: int) -> Text:
    counted = f"  {format_count(parameters)} parameters"
    if active != parameters:
        counted += f", {format_count(active)} active"
    return Text.assemble((heading, "bold"), (counted, "dim"), "\n")


def _training_facts(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    yield "cluster", _cluster(plan.cluster)
    stages = ""
    if plan.layout.pipeline_parallel_size > 1:
        stages = f", stages of {_runs(plan.layers_per_stage)} layers ({plan.pipeline_schedule})"
    yield "layout", f"{plan.layout.told()}{stages}"
    yield (
        "precision",
        f"{plan.precision.compute} compute, {plan.precision.parameters} parameters and gradients, "
        f"{plan.precision.optimizer} optimizer; recompute {plan.recompute}",
    )
    yield (
        "global batch",
        f"{plan.global_batch_tokens:,} tokens = {plan.num_micro_batches} x {plan.micro_batch_size} "
        f"sequences of {plan.sequence_length:,} on {plan.layout.data_parallel_size:,} "
        f"data-parallel rank{'s' if plan.layout.data_parallel_size > 1 else ''}",
    )
    yield (
        "speed",
        f"{format_seconds(plan.step_time_seconds.total)} a step, "
        f"{plan.tokens_per_second:,.0f} tokens/s, "
        f"MFU {plan.model_flops_utilization:.1%} of "
        f"{format_flops(plan.peak_tflops_per_gpu * TFLOP)}/s",
    )
    reliability = plan.reliability
    yield (
        "failures",
        f"one in {format_seconds(reliability.mean_time_between_failures_hours * 3600)}; save "
        f"{format_gb(reliability.checkpoint_gb * GB)} every "
        f"{format_seconds(reliability.checkpoint_interval_seconds)} "
        f"({reliability.checkpoint_interval_steps:,} steps): goodput {reliability.goodput:.1%}",
    )


def _runs(counts: Sequence[int]) -> str:
    """31, 32, 32, 31 as it is when short, else how many of each."""
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    kinds = dict.fromkeys(counts)
    return ", ".join(f"{counts.count(kind)} x {kind}" for kind in kinds)


def _cluster(cluster: ClusterConfig) -> str:
    gpu = cluster_gpu(cluster)
    size = f"{cluster.nodes:,} x {cluster.gpus_per_node} {gpu.name}"
    total = f" = {cluster.num_gpus:,}" if cluster.nodes > 1 else ""
    return f"{size}{total}, {_plain(gpu.memory_gb)} GB each"


def _plain(gb: float) -> str:
    return f"{gb:,.1f}".removesuffix(".0")


def _pairs(pairs: Iterator[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _modules(plan: TrainingPlan) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("module", no_wrap=True)
    for name in ("parameters", "share", "FLOPs/token", "share", "state/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("FLOPs", width=10)
    for share in plan.modules:
        flops = share.training_flops_per_token
        table.add_row(
            _module_name(plan, share.module),
            f"{share.parameters:,}" if share.parameters else "-",
            f"{share.parameters / plan.parameters:.1%}" if share.parameters else "-",
            format_flops(flops) if flops else "-",
            f"{flops / plan.flops_per_token:.1%}" if flops else "-",
            format_gb(share.state_gb * GB) if share.parameters else "-",
            Bar(plan.flops_per_token, 0, flops, color="green"),
        )
    table.add_row(
        "total",
        f"{plan.parameters:,}",
        "",
        format_flops(plan.flops_per_token),
        "",
        format_gb(plan.memory_gb.state * GB),
        style="bold",
    )
    return table


def _module_name(plan: TrainingPlan, module: str) -> str:
    tied = module == "head" and not any(s.module == "head" and s.parameters for s in plan.modules)
    return "head (tied)" if tied else MODULE_NAMES.get(module, module)


def _memory(plan: TrainingPlan) -> Iterator[RenderableType]:
    memory = plan.memory_gb
    parts = [
        ("state", memory.largest_rank_state),
        ("activations", memory.activations),
        ("logits", memory.logits),
        ("buffers", memory.buffers),
        ("overhead", memory.overhead),
    ]
    yield Text.assemble(
        ("Memory  ", "bold"),
        f"{format_gb(memory.total * GB)} of {_plain(memory.device)} GB, "
        f"{format_gb(memory.budget * GB)} may be filled; 16N rule: {format_gb(memory.state * GB)} "
        f"of state, largest rank {format_gb(memory.largest_rank_state * GB)}",
    )
    yield StackedBar(parts, memory.device)
    yield _legend(parts, [format_gb(value * GB) for _, value in parts])


def _step_time(plan: TrainingPlan) -> Iterator[RenderableType]:
    fields = plan.step_time_seconds.model_dump()
    total = fields.pop("total")
    kept = {
        name.replace("_", " "): value for name, value in fields.items() if value >= 0.005 * total
    }
    rest = total - sum(kept.values())
    ranked = sorted(kept.items(), key=lambda item: -item[1])[: len(_COLORS) - 1]
    rest += sum(kept.values()) - sum(value for _, value in ranked)
    parts = [*ranked, ("rest", rest)]
    yield Text.assemble(("Step time  ", "bold"), f"{format_seconds(total)}, simulated")
    yield StackedBar(parts, total)
    yield _legend(parts, [f"{value / total:.0%}" for _, value in parts])


def _rejected(rejected: Sequence[Rejected]) -> Iterator[RenderableType]:
    if not rejected:
        return
    table = Table(box=None, padding=(0, 2), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for entry in rejected[:_MAX_REJECTED]:
        table.add_row(entry.layout, entry.reason)
    more = len(rejected) - _MAX_REJECTED
    if more > 0:
        table.add_row("", f"and {more} more")
    yield Text("\nRejected", style="bold")
    yield table


def _bullets(heading: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    if not lines:
        return
    yield Text(f"\n{heading}", style="bold")
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row("-", line)
    yield table


def serving_table(plan: ServingPlan) -> Group:
    """A serving plan: the split, where a GPU's memory goes, what it holds at once."""
    return Group(*_serving_parts(plan))


def _serving_parts(plan: ServingPlan) -> Iterator[RenderableType]:
    yield _title(f"Serving plan: {plan.model}", plan.parameters, plan.active_parameters)
    yield _pairs(_serving_facts(plan))
    yield Text()
    memory_gb = cluster_gpu(plan.cluster).memory_gb
    parts = [("weights", plan.weights_gb_per_gpu), ("KV cache", plan.kv_cache_gb_per_gpu)]
    yield Text.assemble(
        ("Memory  ", "bold"),
        f"{format_gb(plan.budget_gb_per_gpu * GB)} of {_plain(memory_gb)} GB a GPU "
        f"({plan.utilization:.0%}); the rest is the engine's",
    )
    yield StackedBar(parts, memory_gb)
    yield _legend(parts, [format_gb(value * GB) for _, value in parts])
    yield from _bullets("Notes", plan.notes)


def _serving_facts(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    yield "cluster", _cluster(plan.cluster)
    layout = plan.layout
    stages = f", PP {layout.pipeline_parallel_size}" if layout.pipeline_parallel_size > 1 else ""
    yield (
        "layout",
        f"TP {layout.tensor_parallel_size}{stages}, {layout.data_parallel_size} "
        f"replica{'s' if layout.data_parallel_size > 1 else ''} ({plan.distribution_shape})",
    )
    yield "formats", f"{plan.weight_dtype} weights, {plan.kv_cache_dtype} cache"
    yield (
        "cache",
        f"{plan.kv_bytes_per_token_per_gpu:,.0f} bytes a token and GPU, "
        f"{format_gb(plan.kv_gb_per_sequence_per_gpu * GB)} a sequence of "
        f"{plan.context_tokens:,}",
    )
    yield (
        "holds",
        f"{plan.max_concurrent_sequences:,} sequences of {plan.context_tokens:,} tokens a replica",
    )
    yield (
        "decode",
        f"at most {plan.decode_tokens_per_second_limit:,.0f} tokens/s for one sequence "
        "(memory bandwidth)",
    )
    count = plan.gpus_needed_rule
    yield (
        "quick rule",
        f"{count} GPU{'s' if count > 1 else ''}: weight bytes / ({RULE_MEMORY_SHARE} x memory)",
    )
