"""The HTTP endpoints: which path does what, and which exception becomes which answer.

Composition only: bodies are the protocol's, answers the formats', tokens the engine's. Text becomes
tokens in threads, so that a long prompt delays no probe.
"""

from __future__ import annotations

from hmac import compare_digest
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from herder.engine.request import check_ids
from herder.errors import ConfigError, HerderError
from herder.serve.body import Body
from herder.serve.completions import (
    ChatFormat,
    CompletionFormat,
    ToolChatFormat,
    chat_requests,
    completion_requests,
)
from herder.serve.errors import ApiError, api_error, bad_body
from herder.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from herder.serve.reply import Reply
from herder.serve.server import Host
from herder.serve.service import Service

MAX_BODY_BYTES = 32 * 2**20
_BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_OPEN_PATHS = {"/", "/health", "/ready", "/metrics"}
"""What probes and scrapers read, and the page, which asks for the key itself."""
_PAGE = Path(__file__).with_name("page.html").read_bytes()
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'",
    "cache-control": "no-cache",
}
_router = APIRouter()


def create_app(
    host: Host, *, max_body_bytes: int = MAX_BODY_BYTES, api_key: str | None = None
) -> FastAPI:
    """The application that serves what `host` loads, to those who know `api_key` if there is one.

    Raises ConfigError for a key that no header can carry.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise ConfigError("--api-key: must be printable ASCII, and at least one character")
    app = FastAPI(title="herder", version=version("herder"), docs_url=None, redoc_url=None)
    app.state.host = host
    app.include_router(_router)
    app.add_middleware(_BodyLimit, max_bytes=max_body_bytes)
    if api_key is not None:
        app.add_middleware(_Key, key=api_key)
    for kind in (RequestValidationError, HTTPException, ApiError, HerderError, Exception):
        app.add_exception_handler(kind, _failed)
    return app


class _Key:
    """ASGI middleware: who does not send the key gets 401, before any of the body is read."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] in _OPEN_PATHS or compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            refusal = ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal.response()(scope, receive, send)


class _BodyLimit:
    """ASGI middleware: a body is counted as it comes, and refused once it is too large."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)


def _host(request: Request) -> Host:
    return request.app.state.host


def _service(host: Annotated[Host, Depends(_host)]) -> Service:
    return host.service()


OneHost = Annotated[Host, Depends(_host)]
OneService = Annotated[Service, Depends(_service)]


@_router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: OneService) -> Response:
    """Continue one or more prompts."""
    service.check_model(body.model)
    requests = await run_in_threadpool(completion_requests, service, body)
    form = CompletionFormat(service, body, requests)
    return await Reply(service, body, requests, form).respond(request)


@_router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: OneService) -> Response:
    """Answer a chat."""
    service.check_model(body.model)
    requests = await run_in_threadpool(chat_requests, service, body)
    if body.usable_tools:
        form = ToolChatFormat(service.tokenizer, body)
    else:
        form = ChatFormat(service.tokenizer, wants_logprobs=body.logprobs)
    return await Reply(service, body, requests, form).respond(request)


@_router.get("/v1/models")
async def models(service: OneService) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model_card(service)]}


@_router.get("/v1/models/{name:path}")
async def model(name: str, service: OneService) -> dict[str, Any]:
    """One model by its name."""
    service.check_model(name)
    return _model_card(service)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "herder",
        "max_model_len": service.engine.limits.window_tokens,
    }


@_router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: OneService) -> dict[str, Any]:
    """The ids that a prompt or a chat would become."""
    service.check_model(body.model)
    ids = await run_in_threadpool(_ids_of, service, body)
    window_tokens = service.engine.limits.window_tokens
    return {"count": len(ids), "max_model_len": window_tokens, "tokens": ids}


def _ids_of(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return service.chat_ids(body.messages, body.chat_template_kwargs, body.tools)
    return service.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)


@_router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: OneService) -> dict[str, Any]:
    """The text of ids, control tokens included."""
    service.check_model(body.model)
    check_ids(body.tokens, service.engine.limits, parameter="tokens")
    return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}


@_router.get("/", include_in_schema=False)
async def page() -> Response:
    """A chat box for people; it speaks to the same endpoints as everybody."""
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)


@_router.get("/health")
async def health(host: OneHost) -> Response:
    """Whether the process is worth keeping: 503 once the engine has stopped moving."""
    return JSONResponse({"alive": host.is_alive}, 200 if host.is_alive else 503)


@_router.get("/ready")
async def ready(service: OneService) -> dict[str, str]:
    """Whether requests are welcome: 503 while loading or draining."""
    return {"model": service.name}


@_router.get("/version")
async def show_version(request: Request) -> dict[str, str]:
    """The version of herder."""
    return {"version": request.app.version}


@_router.get("/metrics")
async def metrics(service: OneService) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _failed(request: Request, error: Exception) -> Response:
    """Every exception as its answer; those of the framework are told in our form."""
    path = request.url.path
    if isinstance(error, RequestValidationError):
        return bad_body(error, _BODIES[path]).response()
    if isinstance(error, HTTPException):
        place = f"{request.method} {path}: " if error.status_code in (404, 405) else ""
        message = f"{place}{error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()
    return api_error(error).response()
