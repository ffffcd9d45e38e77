"""The API as an OpenAPI 3.1 document, from the types that requests are decoded into."""

from typing import Any

import msgspec
from msgspec import Struct

from biphase import __version__
from biphase.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from biphase.server.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorResponse,
    ModelList,
    Tokenized,
)

_POSTS: dict[str, tuple[str, type[Struct], type[Struct], type[Struct] | None]] = {
    "/v1/completions": ("Complete prompts", CompletionRequest, Completion, Completion),
    "/v1/chat/completions": ("Answer a chat", ChatRequest, ChatCompletion, ChatChunk),
    "/tokenize": ("Token ids of a prompt or a chat", TokenizeRequest, Tokenized, None),
    "/detokenize": ("Text of token ids", DetokenizeRequest, Detokenized, None),
}

_GETS = {
    "/health": "200 while the engine lives and its steps end; 503 else",
    "/ready": "200 while requests are taken; 503 while the server drains or is not healthy",
    "/metrics": "Prometheus' text format",
    "/openapi.json": "This document",
}


def document() -> dict[str, Any]:
    """The document; request and response bodies are references to its components."""
    types = [kind for _, request, whole, chunk in _POSTS.values() for kind in (request, whole, chunk) if kind]
    every = [*dict.fromkeys([*types, ModelList, ErrorResponse])]
    references, components = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    schema = dict(zip(every, references, strict=True))
    paths = {path: {"post": _post(schema, *described)} for path, described in _POSTS.items()}
    paths["/v1/models"] = {"get": {"summary": "The served model", "responses": _responses(schema, ModelList)}}
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
    key = {"type": "http", "scheme": "bearer", "description": "where the server was started with --api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "biphase", "version": __version__, "description": "An engine behind the OpenAI API."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": key}},
        "security": [{}, {"key": []}],
    }


def _post(schema: dict[Any, Any], summary: str, request: Any, whole: Any, chunk: Any) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": schema[request]}}}
    return {"summary": summary, "requestBody": body, "responses": _responses(schema, whole, chunk)}


def _responses(schema: dict[Any, Any], whole: Any, chunk: Any = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema[whole]}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": schema[chunk]}
    error = {"application/json": {"schema": schema[ErrorResponse]}}
    return {
        "200": {"description": "The answer", "content": content},
        "default": {"description": "A refusal or a failure", "content": error},
    }
