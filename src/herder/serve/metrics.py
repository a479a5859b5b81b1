"""What the server counts, for Prometheus, under vLLM's names with the prefix `herder:`.

One router and one dashboard read both engines. Colons are legal in metric names (Prometheus keeps
them for recording rules by convention only, and vLLM set the custom).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from herder.engine.engine import Engine, Listener
from herder.engine.request import Event, Finished, FinishReason, TokenMade

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class _EngineCounters(Collector):
    """What the engine's scheduler counts itself, read when it is asked for."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._scheduler = engine.scheduler
        self._model = model

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Whole numbers that only grow."""
        scheduler = self._scheduler
        for name, text, value in (
            ("num_preemptions", "Requests that gave way.", scheduler.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", scheduler.num_tokens_looked_up),
            ("prefix_cache_hits", "Those of them that were cached.", scheduler.num_tokens_found),
        ):
            counter = CounterMetricFamily(f"herder:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class ServingMetrics:
    """What one server counts. Each answer to be made counts as one request."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()

        def metric(
            kind: type[_Metric], name: str, text: str, labels: Sequence[str] = (), **options: object
        ) -> _Metric:
            names = ["model_name", *labels]
            return kind(f"herder:{name}", text, names, registry=self._registry, **options)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return metric(Histogram, name, text, buckets=buckets).labels(model)

        # Gauges are read from the engine when they are asked for, so that they are never stale.
        for name, text, read in (
            ("num_requests_running", "Requests being answered.", lambda: engine.num_running),
            ("num_requests_waiting", "Requests in the queue.", lambda: engine.num_waiting),
            ("kv_cache_usage_perc", "KV cache in use, 0 to 1.", lambda: engine.cache_usage),
        ):
            metric(Gauge, name, text).labels(model).set_function(read)
        self._registry.register(_EngineCounters(engine, model))
        self._prompt_tokens = metric(Counter, "prompt_tokens", "Prompt tokens read.").labels(model)
        self._made_tokens = metric(Counter, "generation_tokens", "Tokens made.").labels(model)
        ended = metric(
            Counter, "request_success", "Requests that ended, by how.", ["finished_reason"]
        )
        self._finished = {why: ended.labels(model, why) for why in get_args(FinishReason)}
        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", _TOKEN_SECONDS
        )
        self._request = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def watch(self, listener: Listener, *, counts_prompt: bool) -> Listener:
        """A listener that counts one request's events on their way to `listener`.

        `counts_prompt`: whether this is the prompt's first answer, since usage counts it once.
        """
        start = time.monotonic()
        last: float | None = None

        def counted(event: Event) -> None:
            nonlocal last
            now = time.monotonic()
            if isinstance(event, TokenMade):
                (self._first_token if last is None else self._between_tokens).observe(
                    now - (start if last is None else last)
                )
                last = now
            elif isinstance(event, Finished):
                self._finished[event.reason].inc()
                self._made_tokens.inc(event.num_completion_tokens)
                self._prompt_tokens.inc(event.num_prompt_tokens if counts_prompt else 0)
                self._request.observe(now - start)
            listener(event)

        return counted
