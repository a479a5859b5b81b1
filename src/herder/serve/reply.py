"""From requests to an HTTP answer, whole or streamed: the same for both kinds of completion.

Owns when headers go out (after the first part, so that a failure before it has its true status),
the end of a stream, usage, and giving up when the client has gone. What a chunk looks like is the
format's business.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from herder.engine.request import Request
from herder.serve.answers import Answers, Part, Usage
from herder.serve.errors import api_error
from herder.serve.protocol import SamplingFields
from herder.serve.service import Service
from herder.serve.streaming import DONE, KEEP_ALIVE, EventStream, event, on_disconnect

IGNORED_HEADER = "x-herder-ignored-fields"
"""Names the fields of a request that were accepted and change nothing."""


class Format(Protocol):
    """How one endpoint writes its choices."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def chunks(self, part: Part) -> Iterable[dict[str, Any]]:
        """The `choices` entries of a stream's chunks for one part."""
        ...

    def choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """The whole choice made of these parts."""
        ...


@dataclass
class Totals:
    """Usage over all choices: a prompt counts once, however many answers it got."""

    num_choices: int
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    def count(self, index: int, usage: Usage) -> None:
        """Add a choice that has ended."""
        self.num_completion_tokens += usage.num_completion_tokens
        if index % self.num_choices == 0:
            self.num_prompt_tokens += usage.num_prompt_tokens

    @property
    def body(self) -> dict[str, int]:
        """As the API writes it."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }


class Reply:
    """One HTTP answer to a body."""

    def __init__(
        self,
        service: Service,
        body: SamplingFields,
        requests: Sequence[Request],
        form: Format,
        *,
        keep_alive_seconds: float,
    ) -> None:
        self._service = service
        self._body = body
        self._requests = requests
        self._form = form
        self._keep_alive_seconds = keep_alive_seconds
        self._totals = Totals(body.n or 1)
        self._id = form.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        ignored = ", ".join(body.ignored_fields)
        self._headers = {IGNORED_HEADER: ignored} if ignored else {}

    async def respond(self, http_request: HttpRequest) -> Response:
        """The answer; a stream once its first chunk is there. A failure so far has its status."""
        try:
            if not self._body.stream:
                return await self._whole(http_request)
            chunks = self._stream(http_request)
            first = await anext(chunks)
        except Exception as error:
            return api_error(error).response()
        return EventStream(_resumed(first, chunks), headers=self._headers)

    async def _whole(self, http_request: HttpRequest) -> Response:
        gathered: list[list[Part]] = [[] for _ in self._requests]
        with self._answers() as answers, on_disconnect(http_request, answers.cancel):
            async for part in answers.parts():
                gathered[part.index].append(part)
                if part.usage is not None:
                    self._totals.count(part.index, part.usage)
        choices = [self._form.choice(index, parts) for index, parts in enumerate(gathered)]
        body = {**self._envelope(self._form.whole_object), "choices": choices}
        return JSONResponse({**body, "usage": self._totals.body}, headers=self._headers)

    async def _stream(self, http_request: HttpRequest) -> AsyncGenerator[bytes]:
        has_begun = False
        envelope = self._envelope(self._form.chunk_object)
        usage = {"usage": None} if self._body.includes_usage else {}
        try:
            with self._answers() as answers, on_disconnect(http_request, answers.cancel):
                silence = self._keep_alive_seconds
                async for part in answers.parts_or_silence(after_seconds=silence):
                    has_begun = True
                    if part is None:
                        yield KEEP_ALIVE
                        continue
                    if part.usage is not None:
                        self._totals.count(part.index, part.usage)
                    for choice in self._form.chunks(part):
                        yield event({**envelope, "choices": [choice], **usage})
            if self._body.includes_usage:
                yield event({**envelope, "choices": [], "usage": self._totals.body})
        except Exception as error:
            if not has_begun:
                raise
            yield event(api_error(error).body)
        yield DONE

    def _answers(self) -> Answers:
        return Answers(self._service, self._requests, num_choices=self._totals.num_choices)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
        }


async def _resumed(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """All chunks, the first of which was taken already; what they hold is let go at the end."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()
