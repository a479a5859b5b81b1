"""Server-sent events, and ending an answer whose client has gone.

A line `data: {json}`, a blank line, at the end `data: [DONE]`; comment lines while nothing comes.
Nothing here knows what is inside an event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_SECONDS = 10.0
"""A silent connection gets a comment after this long: proxies close idle ones after 30 to 60 s."""
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One event. JSON has no NaN or infinity, so none can get out."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Sends chunks as they come, each at once."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], *, headers: dict[str, str]) -> None:
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**unbuffered, **headers})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def on_disconnect(request: Request, act: Callable[[], None]) -> Generator[None]:
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
