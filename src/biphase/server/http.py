"""HTTP/1.1 below the routes, where uvicorn's own protocol falls short of the standard or ends a request badly."""

import asyncio
import contextlib
from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Protocol(HttpToolsProtocol):
    """uvicorn's, which keeps the body of a request that offers another protocol.

    A client that would rather speak HTTP/2 says so (``Upgrade: h2c``: Java's, curl's ``--http2``); a server that does
    not care goes on as if it had not (RFC 9110, 7.8). The parser ends at such a head, so another one reads the body.
    """

    parser: Any

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.send_400_response("Invalid HTTP request received.")

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else its body comes by another parser
            super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            if isinstance(self.parser, _Body):
                raise
            self.parser = _Body(self)
            self.cycle.keep_alive = False
            self.parser.feed_data(data[offered.args[0] :])


class _Body:
    """Reads one body behind a head that was read already, and nothing after it."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol, self._complete = protocol, False
        self._parser = httptools.HttpRequestParser(self)
        framing = [(k, v) for k, v in protocol.headers if k in (b"content-length", b"transfer-encoding")]
        lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in framing), b"", b""]
        self._parser.feed_data(b"\r\n".join(lines))

    def feed_data(self, data: bytes) -> None:
        if not self._complete:
            self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._complete:
            self._complete = True
            self._protocol.on_message_complete()

    def should_upgrade(self) -> bool:
        return False


class Ended:
    """What the end of the server cuts off in the middle of an answer ends without a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)
