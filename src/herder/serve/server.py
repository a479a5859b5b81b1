"""The process that serves: the port, uvicorn, signals, the drain before the end.

The port is taken before the model is loaded, so that one in use is told at once. Nothing here knows
endpoints or models.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from herder.errors import ResourceError
from herder.serve.host import Host

DRAIN_SECONDS = 25.0
"""Time for accepted requests after SIGTERM. Kubernetes kills after 30 s by default."""
KEEP_ALIVE_TIMEOUT_SECONDS = 120
"""Idle connections outlive the 60 to 90 s of clients' pools, so that no request meets a close."""
_CLOSE_SECONDS = 3


def bind(host: str, port: int) -> socket.socket:
    """A socket at host:port, 0 for any free port. Raises ResourceError where it cannot be had."""
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


class _Server(uvicorn.Server):
    """uvicorn that drains the host first: the port stays open and says 503 until that is done."""

    def __init__(self, config: uvicorn.Config, host: Host, *, drain_seconds: float) -> None:
        super().__init__(config)
        self._host = host
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._hurrying: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)
        for ending in (self._draining, self._hurrying):
            if ending is not None:
                await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second one ends at once."""
        assert self._loop is not None, "signals are handled while serving only"
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to drain; called again, end at once."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain(self._drain_seconds))
        elif not self.force_exit:
            self.force_exit = True
            self._hurrying = asyncio.ensure_future(self._drain(0))

    async def _drain(self, limit_seconds: float) -> None:
        await asyncio.to_thread(self._host.finish, limit_seconds=limit_seconds)
        self.should_exit = True


def run(
    app: FastAPI,
    host: Host,
    bound: socket.socket,
    *,
    on_ready: Callable[[], None],
    drain_seconds: float = DRAIN_SECONDS,
) -> None:
    """Serve until a signal ends it. Raises what loading the model raised."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config, host, drain_seconds=drain_seconds)

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def loaded() -> None:
            loop.call_soon_threadsafe(server.stop if host.failure else on_ready)

        host.start(on_loaded=loaded)
        await server.serve([bound])

    asyncio.run(serve())
    if host.failure is not None:
        raise host.failure
