"""The process that serves: loading the model, the port, uvicorn, signals, the drain before the end.

The port is taken before the model is loaded, so that one in use is told at once. Nothing here knows
endpoints or models.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from herder.errors import ResourceError, UnavailableError
from herder.serve.service import Service

MAX_STALLED_SECONDS = 120.0
"""A step of one prefill chunk may be slow, but not this slow: then the engine counts as dead."""

_LOADING_SECONDS = 5.0
"""A load that is interrupted gets this long to come to an end."""

DRAIN_SECONDS = 25.0
"""Time for accepted requests after SIGTERM. Kubernetes kills after 30 s by default."""
KEEP_ALIVE_TIMEOUT_SECONDS = 120
"""Idle connections outlive the 60 to 90 s of clients' pools, so that no request meets a close."""
_CLOSE_SECONDS = 3

_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket at host:port, 0 for any free port. Raises ResourceError where it cannot be had."""
    if not host:  # which the system would take for all addresses
        raise ResourceError("the host is empty: 127.0.0.1 is this machine alone, 0.0.0.0 all of it")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ResourceError(_why_not(host, port, error)) from None
    return bound


def _why_not(host: str, port: int, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use. Choose another with --port {port + 1}, or --port 0 "
            "for any free one."
        )
    if number == errno.EACCES:
        return f"port {port} needs special rights. Choose one from 1024 up, such as --port 8000."
    return f"cannot serve at {host}, port {port}: {error}"


def url_of(bound: socket.socket) -> str:
    """The address to reach a bound socket at, from this machine."""
    host, port = bound.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


class Host:
    """Loads a service in a thread of its own, so that probes are answered meanwhile."""

    def __init__(self, load: Callable[[], Service]) -> None:
        self._load = load
        self._service: Service | None = None
        self._is_draining = False
        self.failure: Exception | None = None
        """Why loading failed."""
        self._thread = threading.Thread(target=self._run, name="herder-load", daemon=True)

    def start(self, *, on_loaded: Callable[[], None]) -> None:
        """Begin to load; `on_loaded` is called from that thread, after a failure too."""
        self._on_loaded = on_loaded
        self._thread.start()

    def service(self) -> Service:
        """The service. Raises UnavailableError while it is loading, draining or gone."""
        if self._is_draining:
            raise UnavailableError("the server is shutting down")
        if self.failure is not None:
            raise UnavailableError("the model could not be loaded; the server's log says why")
        if self._service is None:
            raise UnavailableError("the model is still loading")
        return self._service

    @property
    def is_alive(self) -> bool:
        """Whether the engine still moves; true while loading."""
        if self.failure is not None:
            return False
        return self._service is None or self._service.engine.stalled_seconds < MAX_STALLED_SECONDS

    def drain(self) -> None:
        """Not ready from now on; what was accepted goes on."""
        self._is_draining = True
        if self._service is not None:
            self._service.engine.drain()

    def finish(self, *, limit_seconds: float) -> None:
        """Wait for accepted requests, end those that are left with an error, stop the engine."""
        self.drain()
        if self._thread.ident is not None:
            self._thread.join(min(limit_seconds, _LOADING_SECONDS))
        if self._service is None:
            return
        engine = self._service.engine
        if not engine.wait_idle(timeout_seconds=limit_seconds):
            left = engine.num_running + engine.num_waiting
            _log.warning("%d requests were not done after %.0f s", left, limit_seconds)
        engine.close()

    def _run(self) -> None:
        try:
            self._service = self._load()
        except Exception as error:
            self.failure = error
        self._on_loaded()


class Server(uvicorn.Server):
    """uvicorn that loads a host and drains it: the port says 503 before and after, not nothing."""

    def __init__(
        self,
        app: FastAPI,
        host: Host,
        bound: socket.socket,
        *,
        on_ready: Callable[[], None],
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        """`on_ready` is called once the model is loaded, if it is."""
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        self._host = host
        self._bound = bound
        self._on_ready = on_ready
        self._drain_seconds = drain_seconds
        self._endings: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()

    def serve_until_stopped(self) -> None:
        """Serve until a signal or `stop`. Raises what loading the model raised."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._load_and_serve())
        if self._host.failure is not None:
            raise self._host.failure

    def stop(self) -> None:
        """Begin to drain; called again, end at once. From any thread."""
        self._loop.call_soon_threadsafe(self._stop)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls for SIGINT and SIGTERM."""
        self.stop()

    async def _load_and_serve(self) -> None:
        def loaded() -> None:
            self._loop.call_soon_threadsafe(self._loaded)

        self._host.start(on_loaded=loaded)
        await self.serve([self._bound])
        await asyncio.gather(*self._endings)

    def _loaded(self) -> None:
        if self._host.failure is not None:
            self._stop()
        elif not self._endings:
            self._on_ready()

    def _stop(self) -> None:
        is_first = not self._endings
        self.force_exit = not is_first
        limit_seconds = self._drain_seconds if is_first else 0
        self._endings.append(asyncio.ensure_future(self._drain(limit_seconds)))

    async def _drain(self, limit_seconds: float) -> None:
        await asyncio.to_thread(self._host.finish, limit_seconds=limit_seconds)
        self.should_exit = True
