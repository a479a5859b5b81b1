"""The training loop, top to bottom: batch, rate, step, tell, save, evaluate, until done or asked.

Knows neither files nor displays: state goes through `checkpoint.run`, news through the bus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Literal

from herder.checkpoint.run import Progress
from herder.checkpoint.verdict import Verdict
from herder.data.batch import MicroBatch
from herder.data.prefetch import prefetch
from herder.errors import TrainingError
from herder.observe.events import (
    Bus,
    DeviceMemory,
    EvaluationFinished,
    Incident,
    RunFinished,
    StepFinished,
)
from herder.observe.meters import Stopwatch, Throughput
from herder.parallel.apply import Parallel
from herder.parallel.seat import note
from herder.train.device import peak_memory_bytes, peak_memory_of_each
from herder.train.judge import Judge
from herder.train.optimizer import set_learning_rate
from herder.train.routers import RouterWatch, router_noise
from herder.train.saving import Saver
from herder.train.schedule import learning_rate
from herder.train.state import TrainRun
from herder.train.step import NonFiniteError, held_out_loss, train_step

StopSignal = Callable[[], Signals | None]
"""Which signal asks the run to stop, or None: read between steps and held-out micro-batches."""

_SAVE_FAILED = 1 << 10
"""Above every signal's number."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps done, by this process and earlier ones."""
    last_step: StepFinished | None
    """None if this process did no step."""
    held_out: EvaluationFinished | None
    """The last evaluation of this process."""
    checkpoint: Path | None
    """The newest one that this process saved."""
    stopped_by: Signals | None


def train(run: TrainRun, start: Progress, bus: Bus, *, stop_signal: StopSignal) -> Outcome:
    """Do the steps from `start` to train.steps, or to the end of the step a signal came in.

    The state is saved every checkpoint.every_steps, after the last step and when stopped, each time
    after the evaluation of that step, so that the held-out loss is in it; the last save is waited
    for. Raises TrainingError when a step is not finite, CheckpointError when a save
    fails; the newest whole checkpoint stays good in both cases.
    """
    config, steps = run.config, run.config.train.steps
    meter = Throughput(
        flops_per_token=run.flops_per_token, peak_flops_per_second=run.peak_flops_per_second
    )
    routers, parallel = RouterWatch(), run.settings.parallel
    judge = Judge(config.checkpoint.judge)
    whole, tokens, done = Stopwatch(), start.tokens, start.step
    finished, held_out, stopped_by = None, None, None
    with (
        closing(Saver(run, bus)) as saver,
        closing(prefetch(run.micro_batches, range(start.step, steps))) as batches,
    ):
        while done < steps and (stopped_by := agreed_signal(stop_signal, parallel, saver)) is None:
            finished = _do_step(run, done, batches, meter, routers, bus)
            done, tokens = finished.step, tokens + finished.tokens
            before = judge.tainted
            judge.look(finished)
            if done == steps or done % config.observe.log_every_steps == 0:
                told = routers.tell(done)
                judge.look_at_routers(told)
                for stats in told:
                    bus.emit(stats)
                if config.layout == "naive":
                    peaks = peak_memory_of_each(run.settings.device)
                    bus.emit(DeviceMemory(step=done, peak_bytes=peaks))
                bus.emit(finished)
            _tell_if_broken(judge, before, done, bus)
            saver.tell()
            if _is_evaluated_after(run, done):
                held_out = _evaluate(run, done, bus, stop_signal)
            if kind := _is_saved_after(run, done):
                progress = run.progress(step=done, tokens=tokens)
                saver.save(progress, _verdict(judge, held_out, done), is_light=kind == "light")
        if finished:
            saver.save(run.progress(step=done, tokens=tokens), _verdict(judge, held_out, done))
        saver.wait()
    if finished and not stopped_by:
        bus.emit(_run_finished(finished, tokens - start.tokens, whole.seconds(), meter))
    return Outcome(
        step=done,
        last_step=finished,
        held_out=held_out,
        checkpoint=saver.newest,
        stopped_by=stopped_by,
    )


def agreed_signal(
    stop_signal: StopSignal, parallel: Parallel, saver: Saver | None = None
) -> Signals | None:
    """The signal that any rank was asked to stop by: all of them stop after the same step.

    Raises CheckpointError, on all of them too, where one knows that a save failed.
    """
    has_failed = saver is not None and saver.has_failed
    number = parallel.largest(_SAVE_FAILED if has_failed else stop_signal() or 0)
    if saver is not None and number == _SAVE_FAILED:
        saver.wait()
        return None
    return Signals(number) if number else None


def _do_step(
    run: TrainRun,
    step: int,
    batches: Iterator[Sequence[MicroBatch]],
    meter: Throughput,
    routers: RouterWatch,
    bus: Bus,
) -> StepFinished:
    """Do step `step`, counted from 0, and say what came of it."""
    config, watch = run.config.train, Stopwatch()
    rate = learning_rate(
        step, config.schedule, peak=config.optimizer.learning_rate, steps=config.steps
    )
    set_learning_rate(run.optimizer, rate)
    noise = router_noise(run.decoder.config.moe, seed=config.seed, step=step)
    note(step + 1, "waiting for its micro-batches")
    micro_batches = next(batches)
    note(step + 1, "forward and backward")
    try:
        result = train_step(run.decoder, run.optimizer, micro_batches, run.settings, noise=noise)
    except NonFiniteError as error:
        raise _told_as_incident(run, step + 1, error, bus) from error
    note(step + 1, "after the update")
    routers.add(result.routing)
    seconds = watch.seconds()
    meter.add(tokens=run.step_tokens, seconds=seconds)
    return StepFinished(
        step=step + 1,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        learning_rate=rate,
        tokens=round(result.weight),
        seconds=seconds,
        tokens_per_second=meter.tokens_per_second,
        model_flops_utilization=meter.model_flops_utilization,
        peak_memory_bytes=peak_memory_bytes(run.settings.device),
        seconds_left=meter.seconds_for(config.steps - step - 1),
        aux_loss=result.aux_loss,
        z_loss=result.z_loss,
    )


def _tell_if_broken(judge: Judge, before: str | None, step: int, bus: Bus) -> None:
    """An incident where the run is judged broken and was not before this step."""
    if judge.tainted is not None and before is None:
        told = f"{judge.tainted}. What is saved while that lasts is marked tainted, and neither "
        told += "resumed nor served unless it is named: checkpoint.judge"
        bus.emit(Incident(kind="run_looks_broken", message=told, step=step))


def _verdict(judge: Judge, held_out: EvaluationFinished | None, step: int) -> Verdict:
    loss = held_out.loss if held_out is not None and held_out.step == step else math.nan
    return Verdict(tainted=judge.tainted, held_out_loss=loss if math.isfinite(loss) else None)


def _told_as_incident(run: TrainRun, step: int, error: NonFiniteError, bus: Bus) -> TrainingError:
    told = f"{error}: not finite"
    bus.emit(Incident(kind="non_finite_step", message=told, step=step))
    return TrainingError(
        f"step {step}: {told}. The update was not made; checkpoints of earlier steps are good. "
        f"The same command would meet the same step again: lower train.optimizer.learning_rate "
        f"({run.config.train.optimizer.learning_rate}) in a new run_directory, lengthen "
        f"train.schedule.warmup_steps, or try train.precision=fp32."
    )


def _is_saved_after(run: TrainRun, step: int) -> Literal["full", "light"] | None:
    config = run.config.checkpoint
    if step == run.config.train.steps or step % config.every_steps == 0:
        return "full"
    light_every = config.light_every_steps
    return "light" if light_every is not None and step % light_every == 0 else None


def _is_evaluated_after(run: TrainRun, step: int) -> bool:
    every = run.config.evaluate.every_steps
    return every is not None and (step == run.config.train.steps or step % every == 0)


def _evaluate(
    run: TrainRun, step: int, bus: Bus, stop_signal: StopSignal
) -> EvaluationFinished | None:
    """The held-out loss, told; None when a signal came before it was known."""
    watch = Stopwatch()
    note(step, "held-out loss")
    found = held_out_loss(
        run.decoder,
        run.held_out(),
        run.settings,
        is_stopped=lambda: agreed_signal(stop_signal, run.settings.parallel) is not None,
    )
    if found is None:
        return None
    loss, tokens = found
    event = EvaluationFinished(
        step=step,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        tokens=tokens,
        seconds=watch.seconds(),
    )
    bus.emit(event)
    return event


def _run_finished(
    last: StepFinished, tokens: int, seconds: float, meter: Throughput
) -> RunFinished:
    return RunFinished(
        step=last.step,
        loss=last.loss,
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=meter.tokens_per_second,
        model_flops_utilization=meter.model_flops_utilization,
    )
