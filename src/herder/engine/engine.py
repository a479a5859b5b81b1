"""The engine: a bounded queue of requests, answered first come first served by one thread.

It owns the thread, the queue and their accounting, and promises that every accepted request gets
exactly one Finished event. It knows no HTTP and not how tokens are made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from herder.engine.request import Event, Finished, Request, check_request
from herder.engine.runner import Runner
from herder.errors import OverloadedError, UnavailableError

Listener = Callable[[Event], None]
"""Called with each event, from the engine's thread: it must return at once and not raise."""

_ENDINGS = {
    "abort": "the request was ended before its answer was complete",
    "error": "the server shut down before the answer was complete",
}
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Generation:
    """One accepted request."""

    request: Request
    listener: Listener
    cancelled: Literal["abort", "error"] | None = None
    """Why it shall end: set once, read between steps."""


class Engine:
    """Answers requests in order. Safe to call from any thread; close it, or use `with`."""

    def __init__(self, runner: Runner, *, max_queued_requests: int = 256) -> None:
        self.limits = runner.limits
        self.max_queued_requests = max_queued_requests
        self._runner = runner
        self._waiting: deque[Generation] = deque()
        self._running: Generation | None = None
        self._changed = threading.Condition()
        self._is_draining = False
        self._is_closing = False
        self._beat_seconds = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="herder-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_running(self) -> int:
        """Requests being answered."""
        return int(self._running is not None)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def cache_usage(self) -> float:
        """Share of the KV cache that the running request holds."""
        cache = self._runner.cache
        return cache.length / cache.num_tokens if self._running else 0.0

    @property
    def stalled_seconds(self) -> float:
        """How long no step has ended although there is work; infinite if the thread is dead."""
        if not self._thread.is_alive():
            return float("inf")
        return 0.0 if self._is_idle() else time.monotonic() - self._beat_seconds

    def submit(self, asked: Sequence[tuple[Request, Listener]]) -> list[Generation]:
        """Queue all of these, or none.

        Raises RequestError where one does not fit the model, OverloadedError where the queue has
        no room, UnavailableError once the engine is draining or closed.
        """
        for request, _ in asked:
            check_request(request, self.limits)
        generations = [Generation(request, listener) for request, listener in asked]
        with self._changed:
            if self._is_draining:
                raise UnavailableError("the server is shutting down")
            if len(self._waiting) + len(generations) > self.max_queued_requests:
                raise OverloadedError(
                    f"the queue is full: {len(self._waiting)} of {self.max_queued_requests} places "
                    f"are taken and this needs {len(generations)}. Try again later."
                )
            if self._is_idle():
                self._beat_seconds = time.monotonic()
            self._waiting.extend(generations)
            self._changed.notify_all()
        return generations

    def cancel(
        self, generation: Generation, *, reason: Literal["abort", "error"] = "abort"
    ) -> None:
        """End a request within a step, with this reason; nothing happens if it is over."""
        with self._changed:
            generation.cancelled = generation.cancelled or reason
            if generation not in self._waiting:
                return
            self._waiting.remove(generation)
            self._changed.notify_all()
        _tell(generation, _cancelled(generation, num_made=0))

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted go on."""
        with self._changed:
            self._is_draining = True

    def wait_idle(self, *, timeout_seconds: float) -> bool:
        """Wait until nothing runs or waits; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_seconds)

    def close(self) -> None:
        """End what is left, with reason "error", and stop the thread."""
        self.drain()
        with self._changed:
            left = [*self._waiting, *([self._running] if self._running else [])]
            self._is_closing = True
            self._changed.notify_all()
        for generation in left:
            self.cancel(generation, reason="error")
        self._thread.join()

    def _is_idle(self) -> bool:
        return self._running is None and not self._waiting

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                generation = self._running = self._waiting.popleft()
                self._beat_seconds = time.monotonic()
            last = self._answer(generation)
            # Idle before the end is told: whoever hears it finds the books in order.
            with self._changed:
                self._running = None
                self._changed.notify_all()
            _tell(generation, last)

    def _answer(self, generation: Generation) -> Finished:
        """One request to its end, whatever happens: the thread outlives any failure."""
        num_made = 0
        try:
            with self._runner.serving():
                sequence = self._runner.begin(generation.request)
                while generation.cancelled is None:
                    events = self._runner.step(sequence)
                    num_made = sequence.num_made
                    self._beat_seconds = time.monotonic()
                    for event in events:
                        if isinstance(event, Finished):
                            return event
                        _tell(generation, event)
            return _cancelled(generation, num_made=num_made)
        except Exception as error:  # whatever it is, it is told to whoever asked
            return Finished("error", len(generation.request.prompt_ids), num_made, error=error)


def _tell(generation: Generation, event: Event) -> None:
    """Hand an event to whoever listens; one who is gone is a client who left."""
    try:
        generation.listener(event)
    except Exception:
        _log.exception("a listener failed; its request ends")
        generation.cancelled = "abort"


def _cancelled(generation: Generation, *, num_made: int) -> Finished:
    """The closing event of a request that was ended from outside."""
    reason = generation.cancelled
    assert reason is not None, "only a cancelled request is closed here"
    error = UnavailableError(_ENDINGS[reason])
    return Finished(reason, len(generation.request.prompt_ids), num_made, error=error)
