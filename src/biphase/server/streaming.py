"""Answering while the client listens: server-sent events, and ending at once when the client goes away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct
from starlette.types import Receive, Scope, Send

from biphase.engine.messages import Output
from biphase.scheduling.request import FinishReason
from biphase.server.admission import Admitted
from biphase.server.answers import Answer, ChunkUsage
from biphase.server.engine_client import EngineClient
from biphase.server.errors import ApiError
from biphase.server.generation import Generation

Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result | None:
    """Run ``work``; cancel it and return None as soon as the client has gone. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def failure(output: Output) -> ApiError:
    """What the client is told about an output that ends a request without an answer."""
    if output.finish_reason == FinishReason.ABORT:
        return ApiError(output.error or "the request was aborted", status=503, code="aborted")
    return ApiError(output.error or "the engine failed on this request", status=500, code="engine_error")


async def collect(engine: EngineClient, admitted: Admitted, generation: Generation, answer: Answer) -> Struct:
    """The whole answer; ``ApiError`` when the engine fails."""
    parts = []
    with engine.submit(admitted.submit) as outputs:
        while True:
            output = await outputs.next()
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise failure(output)
            delta = generation.push(output)
            parts.append(delta.text)
            if delta.finish_reason is not None:
                return answer.whole("".join(parts), delta, generation.usage)


async def events(
    engine: EngineClient, admitted: Admitted, generation: Generation, answer: Answer
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events: one for each step of the engine that gave this request a token."""
    quiet: ChunkUsage = None if admitted.include_usage else UNSET
    with engine.submit(admitted.submit) as outputs:
        output = await outputs.next()
        for opening in answer.opening(quiet):
            yield event(opening)
        while True:
            if output.finish_reason == FinishReason.ERROR:
                yield event(failure(output).body())
                break
            delta = generation.push(output)
            yield event(answer.chunk(delta, generation.usage if admitted.continuous_usage else quiet))
            if delta.finish_reason is not None:
                if admitted.include_usage:
                    yield event(answer.closing(generation.usage))
                break
            output = await outputs.next()
    yield _DONE


class EventStream:
    """An ASGI response that sends events until they end or the client goes away."""

    def __init__(self, source: AsyncGenerator[bytes]) -> None:
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._source) as source:  # a send may be cancelled while the source waits
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
