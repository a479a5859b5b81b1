"""A plan's ranks on this machine, started again when one is lost, with fewer where that may be.

Owns how often, how soon and with how many. What a job is and how it ends is the launcher's affair,
where a run goes on `resume`'s. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from herder.checkpoint.directory import list_checkpoints, locked, step_of
from herder.checkpoint.source import ModelSource
from herder.config.run import RunConfig
from herder.errors import CheckpointError, PlanError, RankError
from herder.observe.events import Bus, Incident
from herder.observe.sinks import EVENTS, JsonLinesSink
from herder.parallel.launch import Asked, Job, job_of_plan, launch
from herder.plan.training import TrainingPlan
from herder.train.prepare import describe_plan, plan_run

_LONGEST_DELAY_SECONDS = 60.0
_POLL_SECONDS = 0.1


def supervise(
    config: RunConfig,
    source: ModelSource,
    words: Sequence[str],
    stop: Asked,
    *,
    say: Callable[[str], None],
) -> int:
    """Run `herder WORDS` on the plan's ranks to the end of the run; what `launch` returns.

    config: as it was given, before a plan filled in values. A job that lost a rank is started anew
    as config.restart says. Raises RankError when that is used up; what ranks refuse themselves,
    such as a loss that is not finite, at once: it would be the same again.
    """
    restart, run_directory = config.restart, Path(config.run_directory)
    timeout = config.train.collective_timeout_seconds
    _, plan = plan_run(config, source)
    devices, lost_before, num_in_a_row = list(range(plan.layout.num_ranks)), None, 0
    while True:
        newest = _newest_step(run_directory)
        error = _lost_rank(job_of_plan(plan, words, timeout, devices), stop)
        if isinstance(error, int):
            return error
        if _newest_step(run_directory) != newest:
            lost_before, num_in_a_row = None, 0
        if stop.signal is not None or num_in_a_row == restart.max_in_a_row:
            raise error
        say(f"herder: {error}")
        smaller = None
        if restart.shrinks and error.rank == lost_before:
            smaller = _without(error.rank, devices, config, source)
        if smaller is not None:
            filled, plan, devices = smaller
            say(describe_plan(filled, plan))
        lost_before = None if smaller else error.rank
        delay = min(restart.first_delay_seconds * 2**num_in_a_row, _LONGEST_DELAY_SECONDS)
        num_in_a_row += 1
        told = (
            f"starting {plan.layout.num_ranks} ranks {_place(run_directory)} in {delay:g} s, "
            f"{num_in_a_row} of at most {restart.max_in_a_row} times (restart.max_in_a_row) "
            "without a newer checkpoint"
        )
        say(f"herder: {told}")
        _record(run_directory, f"{str(error).splitlines()[0]} Now {told}")
        _wait(delay, stop)
        if stop.signal is not None:
            return 128 + stop.signal


def _lost_rank(job: Job, stop: Asked) -> int | RankError:
    """The job's status, or the error that names the rank it lost."""
    try:
        return launch(job, stop)
    except RankError as error:
        return error


def _without(
    lost: int, devices: Sequence[int], config: RunConfig, source: ModelSource
) -> tuple[RunConfig, TrainingPlan, list[int]] | None:
    """(config, plan, devices) of as many of the other ranks as a plan can be made for; or None.

    Two at least: a plan of one rank is a run of another kind.
    """
    others = [device for rank, device in enumerate(devices) if rank != lost]
    for count in range(len(others), 1, -1):
        with suppress(PlanError):
            return *plan_run(config, source, count), others[:count]
    return None


def _newest_step(run_directory: Path) -> int | None:
    found = list_checkpoints(run_directory)
    return step_of(found[-1]) if found else None


def _place(run_directory: Path) -> str:
    step = _newest_step(run_directory)
    return "from the start" if step is None else f"after step {step}"


def _record(run_directory: Path, message: str) -> None:
    """Among the run's events, which no rank writes at the moment."""
    with suppress(CheckpointError), locked(run_directory):
        bus = Bus([JsonLinesSink(run_directory / EVENTS)])
        bus.emit(Incident(kind="rank_lost", message=message))
        bus.close()


def _wait(seconds: float, stop: Asked) -> None:
    """That long, or until asked to stop."""
    until = time.monotonic() + seconds
    while stop.signal is None and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))
