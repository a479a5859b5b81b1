"""From requests to an HTTP answer, whole or streamed: the same for both kinds of completion.

Owns when headers go out (after the first chunk, so that a failure before it has its true status),
server-sent events (a line `data: {json}`, a blank line, at the end `data: [DONE]`; comment lines
while nothing comes), usage, and giving up when the client has gone. What a chunk looks like is the
format's business.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from herder.engine.engine import Generation, Listener
from herder.engine.request import Event, Finished, Request
from herder.serve.completions import Entry, Format
from herder.serve.errors import api_error
from herder.serve.protocol import AnswerBody
from herder.serve.service import Service

IGNORED_HEADER = "x-herder-ignored-fields"
"""Names the fields of a request that were accepted and change nothing."""
KEEP_ALIVE_SECONDS = 10.0
"""A silent connection gets a comment after this long: proxies close idle ones after 30 to 60 s."""
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_Queue = asyncio.Queue[tuple[int, Event]]
"""Each choice's index and events."""


@dataclass
class Reply:
    """One HTTP answer to a body; each choice is one of the requests."""

    service: Service
    body: AnswerBody
    requests: Sequence[Request]
    form: Format
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    async def respond(self, http_request: HttpRequest) -> Response:
        """The answer; a stream once its first chunk is there. A failure so far has its status."""
        try:
            if not self.body.stream:
                return await self._whole(http_request)
            chunks = self._chunks(http_request)
            first = await anext(chunks)
        except Exception as error:
            return api_error(error).response()
        headers = {**_UNBUFFERED, **self._headers()}
        stream = _stream(first, chunks)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _whole(self, http_request: HttpRequest) -> Response:
        gathered: list[list[Entry]] = [[] for _ in self.requests]
        async for entry in self._entries(http_request, silence_seconds=None):
            if entry is not None:
                gathered[entry["index"]].append(entry)
        choices = [self.form.choice(entries) for entries in gathered]
        body = {**self._envelope(self.form.whole_object), "choices": choices}
        return JSONResponse({**body, "usage": self._usage()}, headers=self._headers())

    async def _chunks(self, http_request: HttpRequest) -> AsyncGenerator[bytes]:
        envelope = self._envelope(self.form.chunk_object)
        includes_usage = self.body.includes_usage
        no_usage = {"usage": None} if includes_usage else {}
        async with aclosing(
            self._entries(http_request, silence_seconds=KEEP_ALIVE_SECONDS)
        ) as entries:
            async for entry in entries:
                if entry is None:
                    yield _KEEP_ALIVE
                else:
                    yield _event({**envelope, "choices": [self.form.shaped(entry)], **no_usage})
        if includes_usage:
            yield _event({**envelope, "choices": [], "usage": self._usage()})

    async def _entries(
        self, http_request: HttpRequest, *, silence_seconds: float | None
    ) -> AsyncGenerator[Entry | None]:
        """What the choices gain, and None after each silence. Raises what the engine raised."""
        events: _Queue = asyncio.Queue()
        generations = self._submitted(events)

        def cancel() -> None:
            for generation in generations:
                self.service.engine.cancel(generation)

        watcher = asyncio.create_task(_when_gone(http_request, cancel))
        num_open = len(generations)
        try:
            while num_open:
                try:
                    async with asyncio.timeout(silence_seconds):
                        index, event = await events.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, Finished):
                    num_open -= 1
                    self._count(index, event)
                for entry in self.form.entries(index, event):
                    yield entry
        finally:
            watcher.cancel()
            cancel()

    def _submitted(self, events: _Queue) -> list[Generation]:
        """Queues all requests or none; what the engine's thread tells goes into `events`."""
        loop = asyncio.get_running_loop()

        def listener(index: int) -> Listener:
            def listen(event: Event) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

            counts_prompt = index % self.body.n == 0
            return self.service.metrics.watch(listen, counts_prompt=counts_prompt)

        asked = [(request, listener(index)) for index, request in enumerate(self.requests)]
        return self.service.engine.submit(asked)

    def _count(self, index: int, end: Finished) -> None:
        """Adds to the usage; a prompt counts once, however many answers it got."""
        if end.error is not None:
            raise end.error
        self.num_completion_tokens += end.num_completion_tokens
        self.num_prompt_tokens += end.num_prompt_tokens if index % self.body.n == 0 else 0

    def _headers(self) -> dict[str, str]:
        ignored = ", ".join(self.body.ignored_fields)
        return {IGNORED_HEADER: ignored} if ignored else {}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.form.id_prefix}{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.service.name,
        }


async def _stream(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """All chunks, the first of which was taken already; what they hold is let go at the end."""
    async with aclosing(rest):
        try:
            yield first
            async for chunk in rest:
                yield chunk
        except Exception as error:
            yield _event(api_error(error).body)
        yield _DONE


def _event(body: dict[str, Any]) -> bytes:
    """One event. JSON has no NaN or infinity, so none can get out."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()


async def _when_gone(request: HttpRequest, act: Callable[[], None]) -> None:
    """Calls `act` as soon as the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    act()
