"""Errors as OpenAI's API tells them: a status and {"error": {message, type, param, code}}.

Owns which exception is which status. A message of ours goes out as it is; what another library
raised stays in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from herder.errors import DataError, OverloadedError, RequestError, UnavailableError

RETRY_AFTER_SECONDS = 1
"""What a refused client is told to wait at least; a queue this short moves within seconds."""

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.parameter = parameter
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.parameter,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP answer, where none of it has been sent yet."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception."""
    retry = {"retry-after": str(RETRY_AFTER_SECONDS)}
    match error:
        case ApiError():
            return error
        case RequestError():
            return invalid(str(error), parameter=error.parameter)
        case DataError():
            return invalid(str(error))
        case OverloadedError():
            return ApiError(429, str(error), "overloaded_error", code="queue_full", headers=retry)
        case UnavailableError():
            return ApiError(503, str(error), "service_unavailable_error", headers=retry)
    _log.error("an answer failed", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why", "internal_server_error")


def invalid(message: str, *, parameter: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be obeyed as it is: 400."""
    return ApiError(400, message, "invalid_request_error", parameter=parameter, code=code)


def model_not_found(asked: str, served: str) -> ApiError:
    """404 for a model that is not the one served."""
    message = f"model: {asked!r} is not served here; {served!r} is"
    return ApiError(
        404, message, "invalid_request_error", parameter="model", code="model_not_found"
    )
