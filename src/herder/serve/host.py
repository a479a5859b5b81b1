"""The life of a served model: loading, ready, draining, closed; and what a probe is told of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from herder.errors import UnavailableError
from herder.serve.service import Service

MAX_STALLED_SECONDS = 120.0
"""A step of one prefill chunk may be slow, but not this slow: then the engine counts as dead."""

_LOADING_SECONDS = 5.0
"""A load that is interrupted gets this long to come to an end."""

_log = logging.getLogger(__name__)


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
        start = time.monotonic()
        engine = self._service.engine
        if not engine.wait_idle(timeout_seconds=limit_seconds):
            left = engine.num_running + engine.num_waiting
            _log.warning("%d requests were not done after %.0f s", left, time.monotonic() - start)
        engine.close()

    def _run(self) -> None:
        try:
            self._service = self._load()
        except Exception as error:
            self.failure = error
        self._on_loaded()
