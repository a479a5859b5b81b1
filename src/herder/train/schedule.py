"""The learning rate as a pure function of the step: resuming needs no state but that number."""

from __future__ import annotations

import math

from herder.config.run import ScheduleConfig
from herder.errors import ConfigError


def learning_rate(step: int, schedule: ScheduleConfig, *, peak: float, steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0, of `steps` in all.

    Warm-up rises linearly and reaches the peak at its last step; cosine and wsd end at
    `minimum_ratio * peak` exactly at the last step. Past the end the last rate holds.
    Source: cosine: SGDR, arXiv:1608.03983, equation 5, without restarts. wsd: MiniCPM,
    arXiv:2404.06395, section 4, with the linear decay of arXiv:2405.18392, section 3.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    step = min(step, steps - 1)
    return peak * _share_after_warmup(step, schedule, steps=steps)


def check_schedule(schedule: ScheduleConfig, *, steps: int) -> None:
    """Refuse a schedule whose parts are longer than the run, by ConfigError."""
    decay = schedule.decay_steps or 0
    if schedule.warmup_steps + decay > steps:
        parts = f"warmup_steps={schedule.warmup_steps}"
        parts += f" + decay_steps={decay}" if decay else ""
        raise ConfigError(
            f"train.schedule: {parts} exceeds train.steps={steps}, so the rate would never reach "
            f"its shape. Shorten it, or --set train.steps={schedule.warmup_steps + decay} or more."
        )


def _share_after_warmup(step: int, schedule: ScheduleConfig, *, steps: int) -> float:
    low = schedule.minimum_ratio
    if schedule.kind == "cosine":
        length = max(1, steps - 1 - schedule.warmup_steps)
        progress = (step - schedule.warmup_steps) / length
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.kind == "wsd":
        assert schedule.decay_steps is not None, "ScheduleConfig requires decay_steps for wsd"
        decayed = max(0, step + 1 - (steps - schedule.decay_steps))
        return 1 - (1 - low) * decayed / schedule.decay_steps
    return 1.0
