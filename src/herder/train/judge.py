"""Whether a run looks broken: its loss or gradient norm leapt, or its routers send all one way.

Owns the thresholds. What follows from it (a checkpoint that is marked, an incident) is the loop's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from herder.config.run import JudgeConfig
from herder.observe.events import RouterStats, StepFinished

_LASTS_STEPS = 3
_LEAST_SPREAD = {"loss": 0.02, "gradient norm": 0.1}
"""Of the median: so even a series is not alarming where it moves by a multiple of next to nothing.
"""
_TO_DEVIATIONS = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


class Judge:
    """Looks at every step of this process. All ranks see the same steps and judge alike.

    A value is broken above median + deviations x spread of the last good ones, where the spread is
    1.4826 x their median absolute deviation, or a small share of the median where that is more. A
    broken value does not become part of what later ones are held against.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._good = {name: deque[float](maxlen=config.window_steps) for name in _LEAST_SPREAD}
        self._found: tuple[int, str] | None = None
        self._routers: str | None = None
        self._routers_since: int | None = None
        self._routers_well = self._routers_were_well = False
        self._step = 0

    @property
    def tainted(self) -> str | None:
        """Why the run is judged broken now, or None: of its last three steps, and its routers."""
        if self._found is not None and self._step - self._found[0] < _LASTS_STEPS:
            return self._found[1]
        return self._routers

    def look(self, step: StepFinished) -> None:
        """Judge one step."""
        self._step, config = step.step, self._config
        values = {"loss": step.loss, "gradient norm": step.gradient_norm}
        limits = {"loss": config.loss_deviations, "gradient norm": config.gradient_deviations}
        for name, value in values.items():
            good, deviations = self._good[name], limits[name]
            if deviations is not None and len(good) >= config.minimum_steps:
                middle = median(good)
                spread = _TO_DEVIATIONS * median(abs(each - middle) for each in good)
                limit = middle + deviations * max(spread, _LEAST_SPREAD[name] * abs(middle))
                if value > limit:
                    told = f"{name} {value:.4g} at step {step.step} is over {limit:.4g}, which is "
                    told += f"{deviations:g} deviations over the median {middle:.4g} of the last "
                    self._found = step.step, f"{told}{len(good)} good steps"
                    continue
            good.append(value)

    def look_at_routers(self, told: Iterable[RouterStats]) -> None:
        """Judge what routers did since they were last told of.

        Small models often begin with a few experts that take all: broken is what had been well for
        minimum_steps and then is not for as many.
        """
        broken = [
            f"layer {each.layer}: {len(each.dominant)} experts that nearly all tokens chose, "
            f"{len(each.dead)} of {len(each.selections)} that none did"
            for each in told
            if each.dominant or 2 * len(each.dead) >= len(each.selections)
        ]
        if self._routers_since is None or bool(broken) == self._routers_well:
            self._routers_since, self._routers_well = self._step, not broken
        lasts = self._step - self._routers_since >= self._config.minimum_steps
        self._routers_were_well |= lasts and self._routers_well
        collapsed = bool(broken) and lasts and self._routers_were_well and self._config.routers
        self._routers = f"routers collapsed: {'; '.join(broken)}" if collapsed else None
