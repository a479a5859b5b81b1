"""Errors as OpenAI's API tells them: a status and {"error": {message, type, param, code}}.

Owns which exception is which status. A message of ours goes out as it is; what another library
raised stays in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from herder.engine.request import refused
from herder.errors import DataError, OverloadedError, RequestError, UnavailableError

RETRY_AFTER = {"retry-after": "1"}
"""Seconds that a refused client is told to wait at least; a queue this short moves within them."""

_log = logging.getLogger(__name__)


@dataclass
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    parameter: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        told = {"message": self.message, "type": self.kind}
        return {"error": {**told, "param": self.parameter, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer, where none of it has been sent yet."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception."""
    message = str(error)
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, message, parameter=error.parameter)
        case DataError():
            return ApiError(400, message)
        case OverloadedError():
            return ApiError(
                429, message, "overloaded_error", code="queue_full", headers=RETRY_AFTER
            )
        case UnavailableError():
            return ApiError(503, message, "service_unavailable_error", headers=RETRY_AFTER)
    _log.error("an answer failed", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why", "internal_server_error")


def bad_body(error: RequestValidationError, kind: type[BaseModel]) -> ApiError:
    """A body that is not JSON or not a `kind`: 400, never FastAPI's 422."""
    violations: list[dict[str, Any]] = [
        {**violation, "loc": tuple(part for part in violation["loc"] if part != "body")}
        for violation in error.errors()
    ]
    first = violations[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if not first["loc"] and first["type"] in ("missing", "model_attributes_type"):
        return ApiError(
            400, "the body must be a JSON object, sent with content-type: application/json"
        )
    return api_error(refused(violations, kind.model_fields))
