"""Whatever is sent, the answer is 200 or a refusal in OpenAI's shape, and the server goes on."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from calling import post, with_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import Server

from biphase.server.protocol import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "a"}
DEEP = b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": ' + b'{"not":' * 900


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}),
        ("/v1/completions", {"prompt": "a", "temperature": 10**400}),
        ("/v1/completions", {"prompt": "a", "seed": 10**400}),
        ("/v1/completions", {"prompt": "a", "n": 10**400}),
        ("/v1/completions", {"prompt": [10**400]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**18}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"1" * 5000: 1}}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"²": 1}}),
        ("/v1/completions", {"prompt": "a", "model": "gpt-4o"}),
        ("/v1/completions", b'{"prompt": "\xff\xfe"}'),
        ("/v1/completions", b"\x00" * 100),
        ("/v1/completions", b'{"prompt": "' + b"a" * 10_000_000 + b'"}'),
        ("/v1/completions", b"[" * 100_000 + b"]" * 100_000),
        ("/v1/completions", DEEP + b"{}" + b"}" * 903),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": [USER], "top_logprobs": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
        ("/v1/chat/completions", {"messages": [[]]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": {"url": "b"}}]}]},
        ),
        *(
            ("/v1/completions", {"prompt": "a", "response_format": {"type": kind, "json_schema": {"schema": {}}}})
            for kind in ("text", "json_object")
        ),
    ],
)
def test_bad_input_is_400_in_the_api_s_shape_and_the_server_goes_on(server: Server, path: str, body: Any) -> None:
    status, answer = post(server.url + path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 500
    assert post(server.url + "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
)


def bodies(kind: type[CompletionRequest] | type[ChatRequest], needed: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Bodies with some fields of the API and anything in them, and bytes that are no JSON at all."""
    fields = [name for name in kind.__struct_fields__ if name not in needed]
    objects = st.dictionaries(st.sampled_from(fields), JSON, max_size=4)
    return objects.map(lambda chosen: json.dumps({**needed, **chosen}).encode()) | st.binary(max_size=40)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(bodies(CompletionRequest, {"prompt": "ab"}), min_size=25, max_size=25),
    st.lists(bodies(ChatRequest, {"messages": [USER]}), min_size=25, max_size=25),
)
def test_random_bodies_never_make_a_server_error(server: Server, completions: list[bytes], chats: list[bytes]) -> None:
    async def work(session: aiohttp.ClientSession) -> list[tuple[int, bytes]]:
        async def send(path: str, body: bytes) -> tuple[int, bytes]:
            async with session.post(server.url + path, data=body) as response:
                return response.status, await response.read()

        sent = [send("/v1/completions", body) for body in completions]
        return list(await asyncio.gather(*sent, *(send("/v1/chat/completions", body) for body in chats)))

    for status, text in with_client(work):
        assert status in (200, 400), text
        if status == 400:
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
