"""Meters: tokens a second, model FLOP/s utilization, time left and memory, from counts and clocks.

Durations are from the monotonic clock. Meters know neither the model nor the device: FLOPs and
peaks are given to them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque


class Stopwatch:
    """Seconds since it was made or last restarted, by a clock that never goes backwards."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def restart(self) -> float:
        """Seconds since the start, which is now."""
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return elapsed


class Throughput:
    """Tokens a second over the last `window_steps` steps, and how that relates to the hardware."""

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops_per_second: float | None,
        window_steps: int = 20,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops_per_second = peak_flops_per_second
        self._steps: deque[tuple[int, float]] = deque(maxlen=window_steps)

    def add(self, *, tokens: int, seconds: float) -> None:
        """Count one step. Time between steps (saving, evaluation) is not to be given."""
        self._steps.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds else 0.0

    @property
    def model_flops_utilization(self) -> float | None:
        """Share of the peak that the model's own FLOPs reach; None where no peak is known.

        Recomputed activations are not counted. Source: PaLM, arXiv:2204.02311, appendix B.
        """
        if not self._peak_flops_per_second:
            return None
        return self.tokens_per_second * self._flops_per_token / self._peak_flops_per_second

    def seconds_for(self, steps: int) -> float:
        """How long so many more steps take at the window's pace; 0 before the first step."""
        if not self._steps:
            return 0.0
        return steps * sum(seconds for _, seconds in self._steps) / len(self._steps)


def peak_process_bytes() -> int:
    """The process's highest resident memory so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
