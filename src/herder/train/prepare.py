"""What is settled before anything heavy is loaded: the cluster, the plan, the values it fills in.

Imports no torch: a run that cannot be is refused, and a plan shown, within half a second.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from herder.checkpoint.directory import list_checkpoints
from herder.checkpoint.metadata import META, read_meta
from herder.checkpoint.source import ModelSource
from herder.config.catalog import cluster_gpu
from herder.config.detect import detect_cluster
from herder.config.load import load_run_config
from herder.config.run import ClusterConfig, RunConfig
from herder.errors import CheckpointError, ConfigError
from herder.plan.naive import describe_naive
from herder.plan.training import TrainingPlan, plan_training
from herder.train.schedule import check_schedule
from herder.units import format_gb, format_seconds

CONFIG = "config.yaml"
"""In a run directory: the recipe as it runs, with planned values filled in."""
_PLANNED = ("micro_batch_size", "global_batch_tokens")
"""Keys of `train` that the plan fills in, and rounds to what can be done, which it then tells."""


def saved_config(run_directory: Path, overrides: Sequence[str]) -> RunConfig:
    """What the run in a folder, which may have been moved, was last started with; --set over it.

    Raises CheckpointError for a folder without a run, ConfigError for what cannot be laid over it.
    """
    path = run_directory / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"--resume {run_directory}: there is no {CONFIG}, so this is no run that "
            "`herder train` has started. Give the run_directory of one, or a recipe."
        )
    if any(each.partition("=")[0].strip() == "run_directory" for each in overrides):
        raise ConfigError(
            f"--set run_directory: --resume goes on in {run_directory}. To start another run of "
            f"the same config: herder train {shlex.quote(str(path))} --set run_directory=..."
        )
    config = load_run_config(path, overrides)
    return config.model_copy(update={"run_directory": str(run_directory)})


def plan_run(
    config: RunConfig, source: ModelSource, num_ranks: int | None = None
) -> tuple[RunConfig, TrainingPlan]:
    """The plan of a run, and the config with planned values filled in.

    num_ranks: how many were started already; a config without a cluster is planned for so many, and
    one that says restart.shrinks for so few, with the global batch of its whole cluster. A run that
    goes on keeps the values it was started with, whatever this machine would get now.
    Raises ConfigError for a schedule longer than the run, PlanError for a plan that cannot be run.
    """
    check_schedule(config.train.schedule, steps=config.train.steps)
    config = _as_started(config)
    cluster, train = config.cluster or _started_cluster(detect_cluster(), num_ranks), config.train
    made = {"layout": config.layout, "model": source.name}
    plan = plan_training(source.architecture, cluster, train, **made)
    num_devices = cluster.nodes * cluster.gpus_per_node
    if config.restart.shrinks and num_ranks is not None and num_ranks < num_devices:
        train = train.model_copy(update={"global_batch_tokens": plan.global_batch_tokens})
        fewer = _started_cluster(cluster, num_ranks)
        plan = plan_training(source.architecture, fewer, train, **made)
    planned = {name: getattr(plan, name) for name in _PLANNED}
    return _with_train(config, planned), plan


def describe_plan(config: RunConfig, plan: TrainingPlan) -> str:
    """What is going to happen, in a few lines, with what was adjusted."""
    memory = plan.memory_gb
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters on {plan.layout.told()}, "
        f"{plan.precision.compute}, recompute {plan.recompute}",
        f"  a step: {plan.num_micro_batches} x {plan.micro_batch_size} sequences of "
        f"{plan.sequence_length:,} = {plan.global_batch_tokens:,} tokens; {config.train.steps:,} "
        f"steps",
        f"  memory: {format_gb(memory.total * 1e9)} of {format_gb(memory.device * 1e9)} "
        f"(state {format_gb(memory.state * 1e9)}, activations "
        f"{format_gb(memory.activations * 1e9)}, logits {format_gb(memory.logits * 1e9)})",
        f"  expected: {format_seconds(plan.step_time_seconds.total)} a step, "
        f"{plan.tokens_per_second:,.0f} tokens/s, MFU {plan.model_flops_utilization:.0%}, "
        f"{format_seconds(plan.step_time_seconds.total * config.train.steps)} in all",
    ]
    lines += [f"  adjusted: {text}" for text in plan.adjustments]
    if plan.naive_devices:
        if cluster_gpu(plan.cluster).kind == "cpu":
            lines.append("  no GPU here: nn.DataParallel computes as one process does")
        lines += [f"  {line}" for line in describe_naive(plan.naive_devices)]
    return "\n".join(lines)


def describe_end(config: RunConfig, step: int, again: str | None) -> str:
    """Where the run is and what comes next; `again` is the command that goes on, if it stopped."""
    if again is not None:
        return f"stopped after step {step} of {config.train.steps}. Go on with:\n  {again}"
    directory = shlex.quote(config.run_directory)
    return (
        f"done: {step} steps, in {directory}. Next:\n"
        f"  herder evaluate {directory}\n"
        f"  herder generate {directory} --prompt 'Once upon a time'\n"
        f"  herder serve {directory}"
    )


def _started_cluster(machine: ClusterConfig, num_ranks: int | None) -> ClusterConfig:
    """Machines like this one that have as many devices as ranks were started."""
    if num_ranks is None:
        return machine
    if cluster_gpu(machine).kind == "cpu":  # any number of ranks may share one, by its name
        return machine.model_copy(update={"nodes": 1, "gpus_per_node": num_ranks, "gpu": "cpu"})
    nodes, rest = divmod(num_ranks, machine.gpus_per_node)
    if rest:
        return machine.model_copy(update={"nodes": 1, "gpus_per_node": num_ranks})
    return machine.model_copy(update={"nodes": nodes})


def _as_started(config: RunConfig) -> RunConfig:
    """The config with planned values that are left out taken from the run it goes on with."""
    run_directory = Path(config.run_directory)
    if not (run_directory / META).is_file() or not list_checkpoints(run_directory):
        return config
    started = read_meta(run_directory).config.get("train")
    if not isinstance(started, dict):
        return config
    absent = [name for name in _PLANNED if getattr(config.train, name) is None]
    return _with_train(config, {name: started.get(name) for name in absent})


def _with_train(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The config with other values under `train`."""
    return config.model_copy(update={"train": config.train.model_copy(update=dict(values))})
