"""The HTTP endpoints: which path does what, and which exception becomes which answer.

Composition only: bodies are the protocol's, answers the formats', tokens the engine's. Text becomes
tokens in threads, so that a long prompt delays no probe.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from herder.config.record import Record
from herder.engine.request import check_ids, refused
from herder.errors import HerderError
from herder.serve.body_limit import MAX_BODY_BYTES, BodyLimit
from herder.serve.chat import ChatFormat, chat_requests
from herder.serve.completions import CompletionFormat, completion_requests
from herder.serve.errors import ApiError, api_error, invalid
from herder.serve.host import Host
from herder.serve.metrics import CONTENT_TYPE
from herder.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from herder.serve.reply import Reply
from herder.serve.service import Service
from herder.serve.streaming import KEEP_ALIVE_SECONDS

_BODIES: dict[str, type[Record]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_router = APIRouter()


def create_app(
    host: Host,
    *,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application that serves what `host` loads."""
    app = FastAPI(title="herder", version=version("herder"), docs_url=None, redoc_url=None)
    app.state.host = host
    app.state.keep_alive_seconds = keep_alive_seconds
    app.include_router(_router)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _bad_http)
    for kind in (ApiError, HerderError, Exception):
        app.add_exception_handler(kind, _failed)
    return app


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
    keep_alive_seconds = request.app.state.keep_alive_seconds
    reply = Reply(service, body, requests, form, keep_alive_seconds=keep_alive_seconds)
    return await reply.respond(request)


@_router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: OneService) -> Response:
    """Answer a chat."""
    service.check_model(body.model)
    requests = await run_in_threadpool(chat_requests, service, body)
    form = ChatFormat(service, body)
    keep_alive_seconds = request.app.state.keep_alive_seconds
    reply = Reply(service, body, requests, form, keep_alive_seconds=keep_alive_seconds)
    return await reply.respond(request)


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
    return {
        "count": len(ids),
        "max_model_len": service.engine.limits.window_tokens,
        "tokens": ids,
    }


def _ids_of(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return service.chat_ids(body.messages, body.chat_template_kwargs)
    add_special_tokens = body.add_special_tokens is not False
    return service.tokenizer.encode(body.prompt or "", add_special_tokens=add_special_tokens)


@_router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: OneService) -> dict[str, Any]:
    """The text of ids, control tokens included."""
    service.check_model(body.model)
    check_ids(body.tokens, service.engine.limits, parameter="tokens")
    return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}


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
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)


async def _bad_body(request: Request, error: Exception) -> Response:
    """A body that is not JSON or not what its endpoint reads: 400, never FastAPI's 422."""
    assert isinstance(error, RequestValidationError), type(error)
    violations: list[dict[str, Any]] = [
        {**violation, "loc": tuple(part for part in violation["loc"] if part != "body")}
        for violation in error.errors()
    ]
    first = violations[0]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"]
        return invalid(f"the body is not JSON: {reason}").response()
    if not first["loc"] and first["type"] in ("missing", "model_attributes_type"):
        return invalid(
            "the body must be a JSON object, sent with content-type: application/json"
        ).response()
    kind = _BODIES[request.url.path]
    return api_error(refused(violations, kind.model_fields)).response()


async def _bad_http(request: Request, error: Exception) -> Response:
    """What the framework refuses: an unknown path, a wrong method, a body it cannot read."""
    assert isinstance(error, HTTPException), type(error)
    place = f"{request.method} {request.url.path}: " if error.status_code in (404, 405) else ""
    return ApiError(
        error.status_code,
        f"{place}{error.detail}",
        "invalid_request_error",
        headers=error.headers,
    ).response()


async def _failed(_: Request, error: Exception) -> Response:
    """Every other exception, as errors.api_error maps it."""
    return api_error(error).response()
