"""Who may use the API: keys, and the web pages of other origins. Both are off unless asked for."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from biphase.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What load balancers, probes and Prometheus read; no key is asked there."""


def middleware(api_keys: Sequence[str], cors_origins: Sequence[str]) -> list[Middleware]:
    """Outermost first: a browser's preflight carries no key, and must see the CORS headers of a refusal."""
    layers = []
    if cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        )
    if api_keys:
        layers.append(Middleware(ApiKeys, keys=tuple(api_keys)))
    return layers


class ApiKeys:
    """Lets requests pass that bear one of the keys; all others are answered 401 as OpenAI does."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
        await ApiError(message, status=401, code="invalid_api_key").response()(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))
        # all are compared, each in constant time, so that the answer's time tells nothing
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
