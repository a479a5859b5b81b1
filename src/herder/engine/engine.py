"""The engine: a bounded queue of requests, many of which one thread answers at once.

It owns the thread, the lock and their accounting, and promises that every accepted request gets
exactly one Finished event. It knows no HTTP, not whose turn it is and not how tokens are made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, Self

from herder.engine.request import Event, Finished, Request
from herder.engine.runner import Runner
from herder.engine.scheduler import Job, Part, Scheduler
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

    job: Job
    listener: Listener
    cancelled: Literal["abort", "error"] | None = None
    """Why it shall end: set once, read between steps."""


class Engine:
    """Answers requests. Safe to call from any thread; close it, or use `with`."""

    def __init__(self, runner: Runner, *, max_queued_requests: int = 256) -> None:
        self.limits = runner.limits
        self.max_queued_requests = max_queued_requests
        self._runner = runner
        self.scheduler = Scheduler(
            runner.blocks(),
            max_num_seqs=runner.config.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            caches_prefixes=runner.config.prefix_caching,
        )
        """To be read only."""
        self._open: dict[Job, Generation] = {}
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
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, those included that were answered in part and gave way."""
        return len(self.scheduler.waiting)

    @property
    def cache_usage(self) -> float:
        """Share of the key-value cache that running requests hold, where it is fullest."""
        pools = self.scheduler.blocks.pools
        return max(1 - pool.num_available / pool.num_blocks for pool in pools)

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
        generations = [
            Generation(self._runner.begin(request), listener) for request, listener in asked
        ]
        with self._changed:
            if self._is_draining:
                raise UnavailableError("the server is shutting down")
            if self.num_waiting + len(generations) > self.max_queued_requests:
                raise OverloadedError(
                    f"the queue is full: {self.num_waiting} of {self.max_queued_requests} places "
                    f"are taken and this needs {len(generations)}. Try again later."
                )
            if self._is_idle():
                self._beat_seconds = time.monotonic()
            self._open |= {generation.job: generation for generation in generations}
            self.scheduler.waiting.extend(generation.job for generation in generations)
            self._changed.notify_all()
        return generations

    def answer(self, request: Request) -> Iterator[Event]:
        """The events of one request as they come; whoever stops listening ends it."""
        events: SimpleQueue[Event] = SimpleQueue()
        (generation,) = self.submit([(request, events.put)])
        try:
            while not isinstance(event := events.get(), Finished):
                yield event
            yield event
        finally:
            self.cancel(generation)

    def cancel(
        self, generation: Generation, *, reason: Literal["abort", "error"] = "abort"
    ) -> None:
        """End a request within a step, with this reason; nothing happens if it is over."""
        with self._changed:
            generation.cancelled = generation.cancelled or reason
            if generation.job not in self.scheduler.waiting:
                return
            self._forget(generation.job)
        _tell(generation, _cancelled(generation))

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
            left = list(self._open.values())
            self._is_closing = True
            self._changed.notify_all()
        for generation in left:
            self.cancel(generation, reason="error")
        self._thread.join()

    def _is_idle(self) -> bool:
        return not self._open

    def _forget(self, job: Job) -> Generation:
        """Under the lock: a job is over. Its end is told after that, so that whoever hears it finds
        the books in order."""
        self.scheduler.remove(job)
        self._changed.notify_all()
        return self._open.pop(job)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._is_closing)
                if not self._open:
                    return
                cancelled = [each for each in self._open.values() if each.cancelled]
                for generation in cancelled:
                    self._forget(generation.job)
                parts = self.scheduler.next_parts()
            for generation in cancelled:
                _tell(generation, _cancelled(generation))
            if parts:
                self._step(parts)

    def _step(self, parts: Sequence[Part]) -> None:
        """One forward, whatever happens: the thread outlives any failure."""
        try:
            events = self._runner.step(parts)
        except Exception as error:  # whatever it is, it is told to whoever asked
            events = [[part.job.answer.failed("error", error)] for part in parts]
        with self._changed:
            generations = [self._open[part.job] for part in parts]
            for part, told in zip(parts, events, strict=True):
                last = told[-1] if told else None
                if not (isinstance(last, Finished) and last.error):
                    self.scheduler.advance(part)
                if isinstance(last, Finished):
                    self._forget(part.job)
            self._beat_seconds = time.monotonic()
        for generation, told in zip(generations, events, strict=True):
            for event in told:
                _tell(generation, event)


def _tell(generation: Generation, event: Event) -> None:
    """Hand an event to whoever listens; one who is gone is a client who left."""
    try:
        generation.listener(event)
    except Exception:
        _log.exception("a listener failed; its request ends")
        generation.cancelled = "abort"


def _cancelled(generation: Generation) -> Finished:
    """The closing event of a request that was ended from outside."""
    reason = generation.cancelled
    assert reason is not None, "only a cancelled request is closed here"
    return generation.job.answer.failed(reason, UnavailableError(_ENDINGS[reason]))
