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
from biphase.server.answers import Answer, joined
from biphase.server.engine_client import EngineClient
from biphase.server.errors import ApiError
from biphase.server.generation import Delta, Generations
from biphase.server.responses import ChunkUsage

Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


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
    message = output.error or "the engine failed on this request"
    if output.error_code == "queue_full":
        retry_after = 1.0 if output.retry_after is None else output.retry_after
        return ApiError(message, status=429, code="queue_full", retry_after=retry_after)
    if output.error_code == "rejected":
        return ApiError(message, code="rejected")
    if output.finish_reason == FinishReason.ABORT:
        return ApiError(message, status=503, code="aborted")
    return ApiError(message, status=500, code="engine_error")


FAILED = (FinishReason.ERROR, FinishReason.ABORT)


async def collect(engine: EngineClient, admitted: Admitted, generations: Generations, answer: Answer) -> Struct:
    """The whole answer; ``ApiError`` when the engine fails."""
    parts: list[list[Delta]] = [[] for _ in admitted.submits]
    with engine.submit(admitted.submits, admitted.choices_per_prompt) as outputs:
        while not generations.complete:
            output = await outputs.next()
            if output.finish_reason in FAILED:
                raise failure(output)
            index, delta = generations.push(output)
            parts[index].append(delta)
            if delta.finish_reason is not None:
                outputs.finish(output.id, delta.finish_reason)
    return answer.whole([joined(deltas) for deltas in parts], generations.usage)


async def events(
    engine: EngineClient, admitted: Admitted, generations: Generations, answer: Answer
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events: one for each token, or for what a step of the engine gave a choice.

    Until the first event a failure is an ``ApiError``, so that it can still become an HTTP status.
    """
    quiet: ChunkUsage = None if admitted.include_usage else UNSET
    opened: set[int] = set()
    with engine.submit(admitted.submits, admitted.choices_per_prompt) as outputs:
        while not generations.complete:
            output = await outputs.next()
            if output.finish_reason in FAILED and not opened:
                raise failure(output)
            if output.finish_reason == FinishReason.ERROR:
                yield event(failure(output).body())
                break
            index, delta = generations.push(output)
            if index not in opened:
                opened.add(index)
                for opening in answer.opening(index, quiet):
                    yield event(opening)
            yield event(answer.chunk(index, delta, generations.usage if admitted.continuous_usage else quiet))
            if delta.finish_reason is not None:
                outputs.finish(output.id, delta.finish_reason)
        else:
            if admitted.include_usage:
                yield event(answer.closing(generations.usage))
    yield _DONE


class EventStream:
    """An ASGI response that sends events until they end or the client goes away.

    Its headers wait for the first event: what fails before it is answered with an HTTP status of its own.
    """

    def __init__(self, source: AsyncGenerator[bytes]) -> None:
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deliver = self._send_whole if scope.get("http_version") == "1.0" else self._send
        refused = await while_connected(deliver(send), receive)
        if refused is not None:
            await refused.response()(scope, receive, send)

    async def _send_whole(self, send: Send) -> ApiError | None:
        """All events as one body with its length: HTTP/1.0 knows no chunks (RFC 9112, 6.1)."""
        try:
            body = b"".join([data async for data in self._source])
        except ApiError as error:
            return error
        headers = [*_HEADERS, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return None

    async def _send(self, send: Send) -> ApiError | None:
        """Send all events, or none and return the error that came before the first."""
        async with contextlib.aclosing(self._source) as source:  # a send may be cancelled while the source waits
            try:
                first = await anext(source)
            except ApiError as error:
                return error
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None
