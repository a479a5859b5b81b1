"""A real server on a loopback port, with a tiny random model, and books that must balance."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from herder.checkpoint.source import resolve_model
from herder.config.run import ServeConfig
from herder.serve.app import create_app
from herder.serve.load import load_service
from herder.serve.server import Host, Server, bind, url_of
from herder.serve.service import Service
from tests.engine_runs import check_idle

MAX_BODY_BYTES = 200_000


def value_in(exposition: str, name: str, **labels: str) -> float:
    """The sum of one metric's values in Prometheus' text format."""
    total = 0.0
    for line in exposition.splitlines():
        found = re.fullmatch(rf"herder:{name}(\{{.*\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(found.group(2))
    return total


@dataclass
class Running:
    """A server that is up."""

    url: str
    service: Service
    server: Server
    http: httpx.Client
    openai: openai.OpenAI

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric, summed over the labels that are not given."""
        return value_in(self.http.get("/metrics").text, name, **labels)

    def wait_idle(self) -> None:
        """Until nothing runs or waits."""
        assert self.service.engine.wait_idle(timeout_seconds=10)


def start(
    service: Callable[[], Service], *, api_key: str | None = None, **options: object
) -> tuple[Server, str, threading.Thread]:
    """A server thread, once it answers."""
    bound = bind("127.0.0.1", 0)
    host = Host(service)
    ready = threading.Event()
    app = create_app(host, max_body_bytes=MAX_BODY_BYTES, api_key=api_key)
    server = Server(app, host, bound, on_ready=ready.set, **options)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    assert ready.wait(30)
    while not server.started:
        time.sleep(0.005)
    return server, url_of(bound), thread


@pytest.fixture
def load(tiny_chat_model: Path) -> Callable[..., Service]:
    """Loads the tiny model as a service, in fp32."""

    def load(**fields: object) -> Service:
        config = ServeConfig(precision="fp32", **fields)
        return load_service(resolve_model(str(tiny_chat_model)), tiny_chat_model, config)

    return load


@pytest.fixture
def serve(load: Callable[..., Service]) -> Iterator[Callable[..., Running]]:
    """Starts servers that end with the test."""
    started: list[tuple[Running, threading.Thread]] = []

    def serve(service: Service | None = None, **options: object) -> Running:
        served = load() if service is None else service
        server, url, thread = start(lambda: served, **options)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        http = httpx.Client(base_url=url, timeout=30)
        running = Running(url, served, server, http, client)
        started.append((running, thread))
        return running

    yield serve
    for running, thread in started:
        running.openai.close()
        running.http.close()
        running.server.stop()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def shared(tiny_chat_model: Path) -> Iterator[Running]:
    """One server for the tests of a file."""
    config = ServeConfig(precision="fp32")
    service = load_service(resolve_model(str(tiny_chat_model)), tiny_chat_model, config)
    server, url, thread = start(lambda: service)
    with (
        httpx.Client(base_url=url, timeout=30) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Running(url, service, server, http, client)
    server.stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def api(shared: Running) -> Iterator[Running]:
    """The file's server; after each test it is idle and its counters agree."""
    yield shared
    shared.wait_idle()
    engine = shared.service.engine
    check_idle(engine.scheduler)
    lines = shared.http.get("/metrics").text
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value_in(lines, gauge) == 0
    ended = value_in(lines, "e2e_request_latency_seconds_count")
    assert value_in(lines, "request_success_total") == ended
    assert shared.http.get("/health").status_code == 200
