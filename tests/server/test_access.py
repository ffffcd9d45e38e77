"""Keys, CORS, health and readiness, draining, and the OpenAPI document, on a running server."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from calling import get, post, stream, with_client
from running_server import Server, wait_for

Launch = Callable[..., Server]


def status_of(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    async def work(session: aiohttp.ClientSession) -> tuple[int, dict[str, str], str]:
        async with session.request(method, url, headers=headers) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.text()

    return with_client(work)


def test_without_keys_and_origins_all_is_open_and_no_cors_header_is_sent(server: Server) -> None:
    status, headers, _ = status_of(server.url + "/v1/models", Origin="http://evil.example")
    assert status == 200
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("sent", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic one"}])
def test_a_wrong_key_is_401_in_the_api_s_shape(launch: Launch, sent: dict[str, str]) -> None:
    server = launch(api_keys=["one", "two"]).wait_until_ready()
    status, _, text = status_of(server.url + "/v1/models", **sent)
    error = json.loads(text)["error"]
    assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert status_of(server.url + "/v1/completions", "POST", **sent)[0] == 401
    for path in ("/health", "/ready", "/metrics"):
        assert status_of(server.url + path, **sent)[0] == 200
    for key in ("one", "two"):
        assert status_of(server.url + "/v1/models", Authorization=f"Bearer {key}")[0] == 200


def test_cors_is_for_the_named_origins_alone_and_a_preflight_needs_no_key(launch: Launch) -> None:
    server = launch(api_keys=["one"], cors_origins=["http://app.example"]).wait_until_ready()
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers, _ = status_of(server.url + "/v1/completions", "OPTIONS", Origin="http://app.example", **asked)
    assert (status, headers["access-control-allow-origin"]) == (200, "http://app.example")
    refused = status_of(server.url + "/v1/models", Origin="http://app.example")
    assert (refused[0], refused[1]["access-control-allow-origin"]) == (401, "http://app.example")
    status, headers, _ = status_of(server.url + "/v1/completions", "OPTIONS", Origin="http://evil.example", **asked)
    assert status == 400
    assert "access-control-allow-origin" not in headers


def test_an_engine_that_hangs_at_work_is_unhealthy_and_an_idle_one_is_not(launch: Launch) -> None:
    server = launch(hang_at=2, health_timeout=0.3).wait_until_ready()
    time.sleep(0.5)
    assert get(server.url + "/health")[0] == 200

    async def work(session: aiohttp.ClientSession) -> tuple[int, str]:
        sending = asyncio.create_task(session.post(server.url + "/v1/completions", json={"prompt": "abc"}))
        end = time.monotonic() + 5
        while True:
            async with session.get(server.url + "/health") as response:
                status, text = response.status, await response.text()
            if status == 503 or time.monotonic() > end:
                break
        async with session.get(server.url + "/ready") as response:
            assert response.status == 503
        sending.cancel()
        return status, text

    status, text = with_client(work)
    assert status == 503
    assert json.loads(text)["error"]["code"] == "engine_stalled"
    wait_for(lambda: get(server.url + "/health")[0] == 200)


BODY = {"prompt": "ab", "max_tokens": 40, "ignore_eos": True}


def while_streaming(server: Server, during: Callable[[aiohttp.ClientSession], Any]) -> str:
    """Start a stream, await ``during`` once its first token is here, return the stream's text."""

    async def work(session: aiohttp.ClientSession) -> str:
        async with session.post(server.url + "/v1/completions", json={**BODY, "stream": True}) as response:
            first = await response.content.readline()
            await during(session)
            return first.decode() + await response.text()

    return with_client(work)


def test_sigterm_lets_a_stream_finish_and_takes_no_other(launch: Launch) -> None:
    server = launch(gap=0.03).wait_until_ready()
    seen: list[Any] = []

    async def during(session: aiohttp.ClientSession) -> None:
        server.process.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:  # the signal takes a moment
            async with session.get(server.url + "/ready") as response:
                status = response.status
        async with session.post(server.url + "/v1/completions", json=BODY) as response:
            seen.append((response.status, (await response.json())["error"]["code"]))
        async with session.get(server.url + "/health") as response:
            seen.append(response.status)

    text = while_streaming(server, during)
    assert seen == [(503, "unavailable"), 200]
    assert text.count('"text":') == 40
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.ended() == (0, "")


@pytest.mark.parametrize("hurry", ["timeout", "signal"])
def test_draining_ends_after_its_time_or_at_a_second_signal(launch: Launch, hurry: str) -> None:
    """The stream would take 40 x 0.2 = 8 s; it is cut long before, with a last chunk."""
    server = launch(gap=0.2, drain_timeout=0.5 if hurry == "timeout" else 30.0).wait_until_ready()

    async def during(session: aiohttp.ClientSession) -> None:
        server.process.send_signal(signal.SIGTERM)
        if hurry == "signal":
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)

    began = time.monotonic()
    text = while_streaming(server, during)
    assert time.monotonic() - began < 6
    assert '"finish_reason":"abort"' in text
    assert server.ended() == (0, "")


def test_an_idle_server_ends_at_once_on_sigterm(launch: Launch) -> None:
    server = launch().wait_until_ready()
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.ended() == (0, "")


def test_the_openapi_document_names_every_route_and_resolves_its_references(server: Server) -> None:
    document = json.loads(get(server.url + "/openapi.json")[1])
    assert document["openapi"] == "3.1.0"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"} <= set(document["paths"])
    components = document["components"]["schemas"]
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(components)
    fields = components["CompletionRequest"]["properties"]
    assert {"prompt", "logit_bias", "response_format", "min_p"} <= set(fields)
    assert components["CompletionRequest"]["additionalProperties"] is False


def test_answers_are_as_the_document_says(server: Server) -> None:
    components = json.loads(get(server.url + "/openapi.json")[1])["components"]["schemas"]
    _, answer = post(server.url + "/v1/completions", {"prompt": "ab", "logprobs": 1})
    assert set(answer) == set(components["Completion"]["properties"])
    assert set(answer["usage"]) == set(components["Usage"]["properties"])
    messages = [{"role": "user", "content": "b"}]
    chunk = stream(server.url + "/v1/chat/completions", messages=messages)[0]
    assert set(chunk) <= set(components["ChatChunk"]["properties"])
