"""Refuses bodies that are too large before they are read: 413."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from herder.serve.errors import ApiError

MAX_BODY_BYTES = 32 * 2**20


class BodyLimit:
    """ASGI middleware; a body of unknown length is counted as it comes."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes"
        return ApiError(413, message, "invalid_request_error")
