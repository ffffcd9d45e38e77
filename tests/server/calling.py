"""Calls to a running server, as tests make them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

Result = TypeVar("Result")


def with_client(work: Callable[[aiohttp.ClientSession], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
            return await work(session)

    return asyncio.run(main())


def post(url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def work(session: aiohttp.ClientSession) -> tuple[int, Any]:
        async with session.post(url, data=data) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    return with_client(work)


def get(url: str) -> tuple[int, str]:
    async def work(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.get(url) as response:
            return response.status, await response.text()

    return with_client(work)


def stream(url: str, **body: Any) -> list[Any]:
    """The events of a stream, decoded; the last must be [DONE]."""

    async def work(session: aiohttp.ClientSession) -> list[Any]:
        async with session.post(url, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            raw = await response.text()
        events = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    return with_client(work)


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
