"""One call of `herder train` in a locked run directory: find, build, announce, train, close.

Owns the files of a run directory that are not checkpoints, and which sinks hear what.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import yaml
from torch.distributed.device_mesh import DeviceMesh

from herder.checkpoint.directory import locked, step_of
from herder.checkpoint.metadata import write_meta
from herder.checkpoint.source import ModelSource
from herder.config.run import RunConfig
from herder.observe.console import progress_sinks
from herder.observe.events import Bus, Notice, RunInterrupted, RunStarted, Sink
from herder.observe.expert_map import ExpertMapSink
from herder.observe.sinks import EVENTS, JsonLinesSink
from herder.observe.tensorboard import TensorBoardSink, tensorboard_is_installed
from herder.observe.trace import TRACES, TRACES_BEFORE
from herder.parallel.mesh import Rank, build_mesh, joined, refuse_other_world
from herder.parallel.trace import traced_collectives
from herder.plan.training import TrainingPlan
from herder.train.build import build_run
from herder.train.device import choose_device, describe_device
from herder.train.interrupt import StopRequest
from herder.train.loop import Outcome, train
from herder.train.prepare import CONFIG
from herder.train.resume import find_checkpoint, load_progress
from herder.train.state import TrainRun

PLAN = "plan.json"
TENSORBOARD = "tensorboard"
EXPERT_MAP = "experts.svg"


def run_training(
    config: RunConfig,
    source: ModelSource,
    plan: TrainingPlan,
    *,
    tokenizer: Path,
    stop: StopRequest,
    rank: Rank | None = None,
) -> Outcome:
    """Train from the start or go on, until done or asked to stop.

    rank: this process' among those of the plan; None: it is the only one. The first rank holds the
    directory's lock, writes and tells. A run whose steps are all done already is left alone.
    """
    device = choose_device(0 if rank is None else rank.local_index)
    if rank is not None:
        refuse_other_world(plan.mesh_axes, rank.count)
    folder = Path(config.run_directory)
    with ExitStack() as stack:
        if rank is None or rank.index == 0:
            stack.enter_context(locked(folder))
            if (folder / TRACES).is_dir():
                shutil.rmtree(folder / TRACES_BEFORE, ignore_errors=True)
                (folder / TRACES).rename(folder / TRACES_BEFORE)
        if config.observe.trace_collectives:
            own = rank or Rank(0, 1, 0)
            stack.enter_context(traced_collectives(folder / TRACES, own, plan.mesh_axes))
        if rank is None:
            return _run(config, source, plan, tokenizer, stop, device, None)
        timeout = config.train.collective_timeout_seconds
        stack.enter_context(joined(rank, device, timeout_seconds=timeout))
        mesh = build_mesh(plan.mesh_axes, device.type)
        return _run(config, source, plan, tokenizer, stop, device, mesh)


def _run(
    config: RunConfig,
    source: ModelSource,
    plan: TrainingPlan,
    tokenizer: Path,
    stop: StopRequest,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> Outcome:
    run_directory = Path(config.run_directory)
    is_first = mesh is None or mesh.get_rank() == 0
    bus = Bus(_sinks(config, run_directory) if is_first else [])
    try:
        checkpoint = find_checkpoint(run_directory, config, bus)
        if checkpoint is not None and step_of(checkpoint) >= config.train.steps:
            return _finished_before(checkpoint, config, bus)
        run = build_run(
            config,
            source,
            tokenizer=tokenizer,
            plan=plan,
            device=device,
            mesh=mesh,
            is_resumed=checkpoint is not None,
        )
        if is_first:
            _write_run_files(run, plan)
        first_step = 0 if checkpoint is None else step_of(checkpoint)
        bus.emit(_run_started(run, plan, first_step))
        start = run.progress(step=0, tokens=0)
        if checkpoint is not None:
            start = load_progress(run, checkpoint, bus)
        outcome = train(run, start, bus, stop_signal=lambda: stop.signal)
        if by := outcome.stopped_by:
            seconds = stop.seconds_since_asked
            bus.emit(RunInterrupted(step=outcome.step, signal=by.name, seconds=seconds))
        return outcome
    finally:
        bus.close()


def _sinks(config: RunConfig, run_directory: Path) -> list[Sink]:
    sinks: list[Sink] = [JsonLinesSink(run_directory / EVENTS)]
    if config.observe.tensorboard and tensorboard_is_installed():
        sinks.append(TensorBoardSink(run_directory / TENSORBOARD))
    sinks.append(ExpertMapSink(run_directory / EVENTS, run_directory / EXPERT_MAP))
    return sinks + progress_sinks(config.observe.progress, sys.stderr)


def _finished_before(checkpoint: Path, config: RunConfig, bus: Bus) -> Outcome:
    step, steps = step_of(checkpoint), config.train.steps
    told = f"{checkpoint} has done {step} steps of {steps}: nothing is left to do. "
    bus.emit(Notice(message=f"{told}To go on, --set train.steps={2 * step}."))
    return Outcome(step=step, last_step=None, held_out=None, checkpoint=checkpoint, stopped_by=None)


def _write_run_files(run: TrainRun, plan: TrainingPlan) -> None:
    """What the run is made of, readable beside its checkpoints; config.yaml is a recipe again."""
    settings = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False)
    fresh = run.run_directory / f".writing-{CONFIG}"
    fresh.write_text(settings, encoding="utf-8")
    fresh.rename(run.run_directory / CONFIG)  # never half there: --resume reads it
    (run.run_directory / PLAN).write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
    write_meta(run.meta, run.run_directory)


def _run_started(run: TrainRun, plan: TrainingPlan, first_step: int) -> RunStarted:
    return RunStarted(
        run_directory=str(run.run_directory),
        model=run.meta.model,
        parameters=plan.parameters,
        first_step=first_step,
        steps=run.config.train.steps,
        step_tokens=run.step_tokens,
        precision=run.settings.precision,
        device=_devices(run.settings.device, plan),
        num_threads=torch.get_num_threads(),
        flops_per_token=run.flops_per_token,
        peak_flops_per_second=run.peak_flops_per_second,
        peak_source=run.peak_source,
        config_hash=run.meta.config_hash,
        git_commit=run.meta.git_commit,
    )


def _devices(device: torch.device, plan: TrainingPlan) -> str:
    told = describe_device(device)
    ranks = plan.layout.num_ranks
    return told if ranks == 1 else f"{ranks} x {told} ({plan.layout.told()})"
