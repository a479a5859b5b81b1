"""A load test of a server: loads one after the other, and what came of each.

Requests and their timings are the client's, tables and pictures the report's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from herder.errors import ResourceError
from herder.serve.load_client import (
    Ask,
    Asked,
    LoadClient,
    Sample,
    as_they_arrive,
    at_once,
    connected,
    model_card,
)

_MEMORY_SECONDS = 0.1
"""Between two looks at the memory of the server."""


@dataclass(frozen=True)
class Load:
    """One load: so many requests at a time, or so many arriving in a second."""

    concurrency: int | None
    per_second: float | None

    @property
    def amount(self) -> float:
        """What a plot has on its axis."""
        return self.concurrency or self.per_second or 0.0


@dataclass(frozen=True)
class LoadResult:
    """What came of one load. Times are of requests that succeeded, in seconds; None: there are no
    such times."""

    concurrency: int | None
    offered_per_second: float | None
    num_requests: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens_mean: float
    completion_tokens_mean: float
    output_tokens_per_second: float
    """Of all requests together, over the whole time of this load."""
    first_token_seconds_p50: float | None
    first_token_seconds_p99: float | None
    token_seconds_p50: float | None
    token_seconds_p99: float | None
    server_peak_bytes: int | None
    """Resident memory of the server's process and its children; None: not asked for."""


def result_of(
    load: Load, samples: Sequence[Sample], seconds: float, peak: int | None
) -> LoadResult:
    """Sums up one load."""
    good = [sample for sample in samples if sample.error is None]
    firsts = [s.first_token_seconds for s in good if s.first_token_seconds is not None]
    gaps = [s.token_seconds for s in good if s.token_seconds is not None]

    def percentile(values: Sequence[float], percent: float) -> float | None:
        return float(np.percentile(values, percent)) if values else None

    made = sum(sample.num_completion_tokens for sample in good)
    return LoadResult(
        load.concurrency,
        load.per_second,
        len(samples),
        dict(Counter(sample.error for sample in samples if sample.error is not None)),
        seconds,
        sum(sample.num_prompt_tokens for sample in good) / max(1, len(good)),
        made / max(1, len(good)),
        made / seconds,
        percentile(firsts, 50),
        percentile(firsts, 99),
        percentile(gaps, 50),
        percentile(gaps, 99),
        peak,
    )


@dataclass(frozen=True)
class LoadTest:
    """What is tried on which server."""

    url: str
    asked: Asked
    loads: Sequence[Load]
    num_requests: int
    """Of each load."""
    model: str | None = None
    """None: the first that the server lists."""
    api_key: str | None = None
    server_pid: int | None = None
    """Whose memory is watched."""

    def run(self, on_progress: Callable[[float], None]) -> tuple[dict[str, Any], list[LoadResult]]:
        """The server's entry of its model in /v1/models, and the results in the loads' order.

        `on_progress` is told how many requests are done in all. Raises ResourceError where there is
        no server, model or process.
        """
        return asyncio.run(self._run(on_progress))

    async def _run(
        self, on_progress: Callable[[float], None]
    ) -> tuple[dict[str, Any], list[LoadResult]]:
        num_done = 0

        async def counted(client: LoadClient, key: str) -> Sample:
            nonlocal num_done
            sample = await client.ask(client.prompt(key))
            num_done += 1
            on_progress(num_done)
            return sample

        results = []
        server = None if self.server_pid is None else _process(self.server_pid)
        async with connected(self.url, self.api_key) as http:
            card = await model_card(http, self.model)
            client = LoadClient(http, card["id"], self.asked)
            await client.calibrate()
            for number, load in enumerate(self.loads):
                # Keys differ between loads, so that a cache of prefixes has only what is shared.
                asks = [
                    partial(counted, client, f"{number}/{index}")
                    for index in range(self.num_requests)
                ]
                results.append(await self._measured(load, asks, server))
        return card, results

    async def _measured(
        self, load: Load, asks: Sequence[Ask], server: psutil.Process | None
    ) -> LoadResult:
        memory = _PeakMemory(server)
        start = perf_counter()
        async with memory:
            if load.per_second is not None:
                samples = await as_they_arrive(asks, load.per_second, self.asked.seed)
            else:
                samples = await at_once(asks, load.concurrency or 1)
        return result_of(load, samples, perf_counter() - start, memory.peak_bytes)


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise ResourceError(f"--server-pid {pid}: there is no such process here") from None


class _PeakMemory:
    """Looks at a process' memory again and again, inside an `async with`."""

    def __init__(self, process: psutil.Process | None) -> None:
        self._process = process
        self.peak_bytes: int | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while self._process is not None:
            try:
                family = [self._process, *self._process.children(recursive=True)]
                now = sum(each.memory_info().rss for each in family)
            except psutil.Error:  # it, or a child of it, has just ended
                return
            self.peak_bytes = max(self.peak_bytes or 0, now)
            await asyncio.sleep(_MEMORY_SECONDS)
