"""The routes of the HTTP API."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from biphase.server.access import middleware
from biphase.server.admission import (
    Admitted,
    ServedModel,
    admit_chat,
    admit_completion,
    chat_ids,
    check_ids,
    encode,
)
from biphase.server.answers import Answer, ChatAnswer, CompletionAnswer
from biphase.server.engine_client import EngineClient
from biphase.server.errors import ApiError, refuse
from biphase.server.generation import Generations
from biphase.server.metrics import Metrics
from biphase.server.openapi import document
from biphase.server.policy import Policy
from biphase.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, read_body
from biphase.server.responses import Detokenized, ModelCard, ModelList, Tokenized
from biphase.server.streaming import EventStream, collect, events, while_connected

MAX_BODY_BYTES = 8 << 20
"""A prompt of a million token ids fits; what is longer is no prompt for any model here."""

LONG_BODY_BYTES = 64 << 10
"""Bodies from here on are checked and tokenized in a thread, so that they do not hold up the streams."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes share."""

    model: ServedModel
    engine: EngineClient
    metrics: Metrics
    created: int
    policy: Policy


def build_app(service: Service) -> Starlette:
    """The ASGI application; errors leave it in OpenAI's shape, whatever their cause."""
    app = Starlette(
        routes=_routes(),
        middleware=middleware(service.policy.api_keys, service.policy.cors_origins),
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, 500: _bug},
    )
    app.state.service = service
    return app


def _routes() -> list[BaseRoute]:
    return [
        Route("/v1/completions", _completions, methods=["POST"]),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
        Route("/v1/models", _models),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", _health),
        Route("/ready", _ready),
        Route("/openapi.json", _openapi),
        Route("/metrics", _metrics),
    ]


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _http_error(request: Request, error: Exception) -> Response:
    """No such path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    refused = ApiError(message, status=error.status_code, headers=error.headers)
    return refused.response()


def _bug(request: Request, error: Exception) -> Response:
    return ApiError("internal error of the server", status=500, code="internal_error").response()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _completions(request: Request) -> ASGIApp:
    service, raw = _service(request), await _read(request)
    identity = f"cmpl-{uuid.uuid4().hex}"

    def admit() -> Admitted:
        return admit_completion(read_body(raw, CompletionRequest), service.model, identity)

    admitted = await _aside(admit, raw)
    answer = CompletionAnswer(
        identity, int(time.time()), service.model.name, service.model.text, logprobs=admitted.logprobs
    )
    return await _generate(request, admitted, answer)


async def _chat(request: Request) -> ASGIApp:
    service, raw = _service(request), await _read(request)
    identity = f"chatcmpl-{uuid.uuid4().hex}"

    def admit() -> Admitted:
        return admit_chat(read_body(raw, ChatRequest), service.model, identity)

    admitted = await _aside(admit, raw)
    answer = ChatAnswer(identity, int(time.time()), service.model.name, service.model.text, logprobs=admitted.logprobs)
    return await _generate(request, admitted, answer)


async def _generate(request: Request, admitted: Admitted, answer: Answer) -> ASGIApp:
    service = _service(request)
    _check_taking(service.engine)
    generations = Generations(admitted, service.model.text)
    if admitted.stream:
        return EventStream(events(service.engine, admitted, generations, answer))
    whole = await while_connected(collect(service.engine, admitted, generations, answer), request.receive)
    return _json(whole)  # None when the client has gone: nobody reads it


async def _models(request: Request) -> Response:
    service = _service(request)
    return _json(ModelList([ModelCard(service.model.name, service.created, service.model.max_model_len)]))


async def _tokenize(request: Request) -> Response:
    service, raw = _service(request), await _read(request)

    def tokenize() -> list[int]:
        body = read_body(raw, TokenizeRequest)
        service.model.check_name(body.model)
        if body.messages is not None and body.prompt is None:
            return chat_ids(body.messages, service.model)
        if body.prompt is None or body.messages is not None:
            refuse("give either prompt or messages", "prompt")
        return encode(body.prompt, service.model, body.add_special_tokens, "prompt")

    tokens = await _aside(tokenize, raw)
    return _json(Tokenized(len(tokens), service.model.max_model_len, tokens))


async def _detokenize(request: Request) -> Response:
    service, raw = _service(request), await _read(request)
    body = read_body(raw, DetokenizeRequest)
    service.model.check_name(body.model)
    tokens = check_ids(body.tokens, service.model, "tokens")
    return _json(Detokenized(service.model.text.decode(tokens, show_control=True)))


async def _health(request: Request) -> Response:
    _check_health(_service(request))
    return Response()


async def _ready(request: Request) -> Response:
    _check_health(_service(request))
    _check_taking(_service(request).engine)
    return Response()


def _check_health(service: Service) -> None:
    """A hung engine must not look healthy (vLLM #39863), nor a busy one dead: only steps that end count."""
    stalled = service.engine.stalled_seconds
    if not service.engine.alive:
        raise ApiError("the engine is not running", status=503, code="engine_down")
    if stalled > service.policy.health_timeout:
        raise ApiError(f"there is work and no step has ended for {stalled:.0f} s", status=503, code="engine_stalled")


def _check_taking(engine: EngineClient) -> None:
    if engine.closing or engine.draining or not engine.alive:
        raise _shutting_down()


def _shutting_down() -> ApiError:
    return ApiError("the server is shutting down and takes no request", status=503, code="unavailable")


async def _openapi(request: Request) -> Response:
    return _json(document())


async def _metrics(request: Request) -> Response:
    _service(request).metrics.tasks.set(len(asyncio.all_tasks()))
    return Response(_service(request).metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


async def _read(request: Request) -> bytes:
    """The body, refused as soon as it is longer than ``MAX_BODY_BYTES``."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                refuse(
                    f"the body is longer than {MAX_BODY_BYTES:,} bytes, the most that is read", code="body_too_large"
                )
            parts.append(part)
    except ClientDisconnect:
        raise ApiError("the client went away before its request was complete", status=400) from None
    except asyncio.CancelledError:  # the server ends, and has waited for the rest as long as it does
        raise _shutting_down() from None
    return b"".join(parts)


async def _aside(work: Callable[[], Result], raw: bytes) -> Result:
    """Run ``work`` on the request's body: here when it is quick, in a thread when it is long or may hold a schema."""
    quick = len(raw) < LONG_BODY_BYTES and b"json_schema" not in raw and b"\\u" not in raw  # which may spell it too
    return work() if quick else await asyncio.to_thread(work)
