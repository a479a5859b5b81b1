"""The engine: a bounded queue of requests, answered first come first served by one thread.

It owns the thread, the queue and their accounting, and promises that every accepted request gets
exactly one Finished event. It knows no HTTP and not how tokens are made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Self

from herder.engine.request import Event, Finished, Request, SamplingParams, check_request
from herder.engine.runner import Runner
from herder.errors import OverloadedError, UnavailableError

Listener = Callable[[Event], None]
"""Called with each event, from the engine's thread: it must return at once and not raise."""

_log = logging.getLogger(__name__)


class Generation:
    """One accepted request: its events, and the means to end it."""

    def __init__(self, engine: Engine, request: Request, listener: Listener | None) -> None:
        self.request = request
        self._engine = engine
        self._queue: SimpleQueue[Event] = SimpleQueue()
        self._listener = listener or self._queue.put
        self.cancelled: Exception | None = None
        """Why it shall end: set once, read between steps."""

    def events(self) -> Iterator[Event]:
        """The events as they come, to the last; only where no listener was given."""
        while True:
            event = self._queue.get()
            yield event
            if isinstance(event, Finished):
                return

    def cancel(self) -> None:
        """End it within a step, with reason "abort"; nothing happens if it is over."""
        self._engine._cancel(self, _ABORTED)

    def tell(self, event: Event) -> None:
        """Hand an event to whoever listens; one who is gone is a client who left."""
        try:
            self._listener(event)
        except Exception:
            _log.exception("a listener failed; its request ends")
            self.cancelled = _ABORTED


_ABORTED = UnavailableError("the client went away")


class Engine:
    """Answers requests in order. Safe to call from any thread; close it, or use `with`."""

    def __init__(self, runner: Runner, *, max_queued_requests: int = 256) -> None:
        self.limits = runner.limits
        self.max_queued_requests = max_queued_requests
        self._runner = runner
        self._waiting: deque[Generation] = deque()
        self._running: Generation | None = None
        self._changed = threading.Condition()
        self._refusal: UnavailableError | None = None
        self._closing = False
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
        busy = self._running is not None or bool(self._waiting)
        return time.monotonic() - self._beat_seconds if busy else 0.0

    def submit(self, request: Request, listener: Listener | None = None) -> Generation:
        """Queue one request. See submit_all."""
        return self.submit_all([request], [listener])[0]

    def submit_all(
        self, requests: Sequence[Request], listeners: Sequence[Listener | None]
    ) -> list[Generation]:
        """Queue all of these, or none.

        Raises RequestError where one does not fit the model, OverloadedError where the queue has
        no room, UnavailableError once the engine is draining or closed.
        """
        for request in requests:
            check_request(request, self.limits)
        pairs = zip(requests, listeners, strict=True)
        generations = [Generation(self, request, listener) for request, listener in pairs]
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            self._check_room(len(generations))
            if not self._waiting and self._running is None:
                self._beat_seconds = time.monotonic()
            self._waiting.extend(generations)
            self._changed.notify_all()
        return generations

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Event]:
        """Queue a prompt and give its events."""
        return self.submit(Request(prompt_ids, params)).events()

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted go on."""
        with self._changed:
            self._refusal = UnavailableError("the server is shutting down")

    def wait_idle(self, *, timeout_seconds: float) -> bool:
        """Wait until nothing runs or waits; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._running is None, timeout_seconds
            )

    def close(self) -> None:
        """End what is left, with reason "error", and stop the thread."""
        self.drain()
        ended = UnavailableError("the server shut down before the answer was complete")
        with self._changed:
            left = [*self._waiting, self._running]
            self._closing = True
            self._changed.notify_all()
        for generation in left:
            if generation is not None:
                self._cancel(generation, ended)
        self._thread.join()

    def _check_room(self, num_new: int) -> None:
        room = self.max_queued_requests - len(self._waiting)
        if num_new > room:
            raise OverloadedError(
                f"the queue is full: {len(self._waiting)} of {self.max_queued_requests} places "
                f"are taken and this needs {num_new}. Try again later."
            )

    def _cancel(self, generation: Generation, why: UnavailableError) -> None:
        with self._changed:
            if generation.cancelled is None:
                generation.cancelled = why
            try:
                self._waiting.remove(generation)
            except ValueError:
                return
            self._changed.notify_all()
        generation.tell(_cancelled(generation, num_made=0))

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                generation = self._running = self._waiting.popleft()
                self._beat_seconds = time.monotonic()
            last = self._answer(generation)
            # Idle before the end is told: whoever hears it finds the books in order.
            with self._changed:
                self._running = None
                self._changed.notify_all()
            generation.tell(last)

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
                        generation.tell(event)
            return _cancelled(generation, num_made=num_made)
        except Exception as error:  # whatever it is, it is told to whoever asked
            num_prompt_tokens = len(generation.request.prompt_ids)
            return Finished("error", num_prompt_tokens, num_made, error=error)


def _cancelled(generation: Generation, *, num_made: int) -> Finished:
    """The closing event of a request that was ended from outside."""
    why = generation.cancelled
    num_prompt_tokens = len(generation.request.prompt_ids)
    if why is _ABORTED:
        return Finished("abort", num_prompt_tokens, num_made)
    return Finished("error", num_prompt_tokens, num_made, error=why)
