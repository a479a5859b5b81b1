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
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from herder.engine.request import Finished, Request
from herder.serve.answers import Answers
from herder.serve.errors import api_error
from herder.serve.formats import Entry, Format
from herder.serve.protocol import AnswerBody
from herder.serve.service import Service

IGNORED_HEADER = "x-herder-ignored-fields"
"""Names the fields of a request that were accepted and change nothing."""
KEEP_ALIVE_SECONDS = 10.0
"""A silent connection gets a comment after this long: proxies close idle ones after 30 to 60 s."""
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Reply:
    """One HTTP answer to a body."""

    def __init__(
        self, service: Service, body: AnswerBody, requests: Sequence[Request], form: Format
    ) -> None:
        self._service = service
        self._body = body
        self._requests = requests
        self._form = form
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._id = form.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        ignored = ", ".join(body.ignored_fields)
        self._headers = {IGNORED_HEADER: ignored} if ignored else {}

    async def respond(self, http_request: HttpRequest) -> Response:
        """The answer; a stream once its first chunk is there. A failure so far has its status."""
        try:
            if not self._body.stream:
                return await self._whole(http_request)
            chunks = self._chunks(http_request)
            first = await anext(chunks)
        except Exception as error:
            return api_error(error).response()
        headers = {**_UNBUFFERED, **self._headers}
        stream = _stream(first, chunks)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _whole(self, http_request: HttpRequest) -> Response:
        gathered: list[list[Entry]] = [[] for _ in self._requests]
        async for entry in self._entries(http_request, silence_seconds=None):
            if entry is not None:
                gathered[entry["index"]].append(entry)
        choices = [self._form.choice(entries) for entries in gathered]
        body = {**self._envelope(self._form.whole_object), "choices": choices}
        return JSONResponse({**body, "usage": self._usage()}, headers=self._headers)

    async def _chunks(self, http_request: HttpRequest) -> AsyncGenerator[bytes]:
        envelope = self._envelope(self._form.chunk_object)
        includes_usage = self._body.includes_usage
        no_usage = {"usage": None} if includes_usage else {}
        async with aclosing(
            self._entries(http_request, silence_seconds=KEEP_ALIVE_SECONDS)
        ) as entries:
            async for entry in entries:
                if entry is None:
                    yield _KEEP_ALIVE
                else:
                    yield _event({**envelope, "choices": [entry], **no_usage})
        if includes_usage:
            yield _event({**envelope, "choices": [], "usage": self._usage()})

    async def _entries(
        self, http_request: HttpRequest, *, silence_seconds: float | None
    ) -> AsyncGenerator[Entry | None]:
        """What the choices gain, and None after each silence."""
        num_choices = self._body.n
        with (
            Answers(self._service, self._requests, num_choices=num_choices) as answers,
            _on_disconnect(http_request, answers.cancel),
        ):
            async for heard in answers.events(silence_seconds=silence_seconds):
                if heard is None:
                    yield None
                    continue
                index, event = heard
                if isinstance(event, Finished):
                    self._num_completion_tokens += event.num_completion_tokens
                    # A prompt counts once, however many answers it got.
                    is_first = index % num_choices == 0
                    self._num_prompt_tokens += event.num_prompt_tokens if is_first else 0
                for entry in self._form.entries(index, event):
                    yield entry

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
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


@contextmanager
def _on_disconnect(request: HttpRequest, act: Callable[[], None]) -> Generator[None]:
    """Inside, `act` is called as soon as the client has closed its connection."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        act()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
