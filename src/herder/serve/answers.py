"""The answers to one HTTP request while the engine makes them.

Owns the way from the engine's thread into the event loop. Nothing here knows what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from herder.engine.engine import Listener
from herder.engine.request import Event, Finished, Request
from herder.serve.service import Service


class Answers:
    """All choices of one HTTP request. Use as a context: leaving it ends what still runs."""

    def __init__(self, service: Service, requests: Sequence[Request], *, num_choices: int) -> None:
        """Queues all requests or none; raises as Engine.submit does."""
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._engine = service.engine

        def listener(index: int) -> Listener:
            def listen(event: Event) -> None:
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

            return service.metrics.watch(listen, counts_prompt=index % num_choices == 0)

        asked = [(request, listener(index)) for index, request in enumerate(requests)]
        self._generations = self._engine.submit(asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End every choice within a step; nothing happens to those that are over."""
        for generation in self._generations:
            self._engine.cancel(generation)

    async def events(
        self, *, silence_seconds: float | None
    ) -> AsyncGenerator[tuple[int, Event] | None]:
        """Each choice's index and events until all have ended; None after so long a silence.

        Raises what the engine raised.
        """
        num_open = len(self._generations)
        while num_open:
            try:
                async with asyncio.timeout(silence_seconds):
                    index, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Finished):
                num_open -= 1
                if event.error is not None:
                    raise event.error
            yield index, event
