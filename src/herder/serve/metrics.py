"""What the server counts, for Prometheus, under vLLM's names with the prefix `herder:`.

One router and one dashboard read both engines. Colons are legal in metric names (Prometheus keeps
them for recording rules by convention only, and vLLM set the custom). What this engine does not
have (prefix cache, preemption) is absent: a missing metric is not 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from herder.engine.engine import Engine, Listener
from herder.engine.request import Event, Finished, TokenMade

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISH_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class _EngineGauges(Collector):
    """Read from the engine when they are asked for, so that they are never stale."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        engine = self._engine
        yield self._gauge("num_requests_running", "Requests being answered.", engine.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", engine.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV cache in use, 0 to 1.", engine.cache_usage)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"herder:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


class ServingMetrics:
    """The counters and histograms of one server. Each answer to be made counts as one request."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineGauges(engine, model))

        def counter(name: str, text: str) -> Counter:
            family = Counter(f"herder:{name}", text, ["model_name"], registry=self._registry)
            return family.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(
                f"herder:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
            )
            return family.labels(model)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens read.")
        self._generation_tokens = counter("generation_tokens", "Tokens made.")
        finished = Counter(
            "herder:request_success",
            "Requests that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(model, reason) for reason in _FINISH_REASONS}
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
                self._generation_tokens.inc(event.num_completion_tokens)
                self._prompt_tokens.inc(event.num_prompt_tokens if counts_prompt else 0)
                self._request.observe(now - start)
            listener(event)

        return counted
