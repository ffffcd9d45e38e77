"""Several prompts, several choices, log-probabilities, and refusals of the engine, over real sockets."""

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from calling import post, stream, usage, with_client
from running_server import Server, wait_for

Launch = Callable[..., Server]


def test_a_list_of_prompts_gives_n_choices_of_each_in_order(server: Server) -> None:
    body = {"prompt": ["ab", [99, 100, 101]], "n": 2, "max_tokens": 4}
    _, answer = post(server.url + "/v1/completions", body)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "ab", "stop"),
        (1, "ab", "stop"),
        (2, "cde", "stop"),
        (3, "cde", "stop"),
    ]
    assert answer["usage"] == usage(2 + 3, 2 * 3 + 2 * 4)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_of_a_stream_carry_their_index_and_end_each(server: Server, path: str) -> None:
    prompt = {"prompt": "ab"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "b"}]}
    options = {"include_usage": True}
    *chunks, last = stream(server.url + path, n=3, max_tokens=20, stream_options=options, **prompt)
    expected = "ab" if path == "/v1/completions" else "u:b;a:"
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in own]
        assert "".join(texts) == expected
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert path == "/v1/completions" or own[0]["delta"] == {"role": "assistant", "content": ""}
    assert last["usage"] == usage(len(expected), 3 * (len(expected) + 1))


def test_a_stop_string_ends_one_choice_and_the_others_go_on(server: Server) -> None:
    body = {"prompt": ["abc", "xyz"], "max_tokens": 5, "stop": "b", "ignore_eos": True}
    _, answer = post(server.url + "/v1/completions", body)
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in answer["choices"]] == [
        ("a", "stop", "b"),
        ("xyzxy", "length", None),
    ]
    assert answer["usage"]["completion_tokens"] == 2 + 5


def test_a_stop_token_id_is_told_and_gives_no_text(server: Server) -> None:
    _, answer = post(server.url + "/v1/completions", {"prompt": "abc", "stop_token_ids": [98]})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 98)
    assert answer["usage"]["completion_tokens"] == 2


def test_leaving_frees_every_choice(server: Server) -> None:
    async def leave(session: aiohttp.ClientSession) -> str:
        body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 60, "ignore_eos": True, "stream": True}
        response = await session.post(server.url + "/v1/completions", json=body)
        line = await response.content.readline()
        response.close()
        return str(json.loads(line.removeprefix(b"data: "))["id"])

    identity = with_client(leave)
    expected = {f"{identity}-{index}" for index in range(4)}
    wait_for(lambda: expected <= {frame["id"] for frame in server.frames() if frame["type"] == "Abort"})


def test_logprobs_of_a_completion(server: Server) -> None:
    _, answer = post(server.url + "/v1/completions", {"prompt": "a€", "max_tokens": 9, "logprobs": 2})
    choice = answer["choices"][0]
    assert choice["text"] == "a€"
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<eos>"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 5
    assert choice["logprobs"]["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    assert answer["usage"]["completion_tokens"] == 5


def test_the_chosen_token_stands_among_none_of_the_likeliest(server: Server) -> None:
    _, answer = post(server.url + "/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 0})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


def test_logprobs_of_a_chat_stream_come_with_their_tokens(server: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 1}
    chunks = stream(server.url + "/v1/chat/completions", max_tokens=4, **body)
    scored = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["bytes"] for entry in scored] == [[byte] for byte in b"u:\xc3\xa9"]
    assert [entry["token"] for entry in scored] == ["u", ":", "\ufffd", "\ufffd"]
    assert scored[0]["top_logprobs"] == [{"token": "u", "logprob": -0.5, "bytes": [117]}]


def test_no_logprobs_were_asked_none_are_given(server: Server) -> None:
    _, answer = post(server.url + "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer["choices"][0]["logprobs"] is None


def test_cached_tokens_of_each_prompt_are_in_the_usage(launch: Launch) -> None:
    server = launch(cached=2).wait_until_ready()
    _, answer = post(server.url + "/v1/completions", {"prompt": ["abc", "abd"], "n": 2, "max_tokens": 1})
    assert answer["usage"] == usage(6, 4, cached=4)
    options = {"include_usage": True}
    assert stream(server.url + "/v1/completions", prompt="abc", stream_options=options)[-1]["usage"] == usage(3, 4, 2)


def answer_of(server: Server, **body: Any) -> tuple[int, str | None, Any]:
    """Status, Retry-After and body."""

    async def work(session: aiohttp.ClientSession) -> tuple[int, str | None, Any]:
        async with session.post(server.url + "/v1/completions", json=body) as response:
            return response.status, response.headers.get("retry-after"), await response.json()

    return with_client(work)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("seconds", "header"), [(None, "1"), (0.2, "1"), (3.1, "4")])
def test_a_full_queue_is_429_with_retry_after(
    launch: Launch, streamed: bool, seconds: float | None, header: str
) -> None:
    server = launch(refuse="queue_full", retry_after=seconds).wait_until_ready()
    status, retry_after, body = answer_of(server, prompt="a", stream=streamed)
    assert (status, retry_after) == (429, header)
    assert body["error"]["type"] == "rate_limit_error"
    assert body["error"]["code"] == "queue_full"
    assert "7 requests wait" in body["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_failure_before_the_first_token_is_an_http_status_in_a_stream_too(launch: Launch, streamed: bool) -> None:
    assert answer_of(launch(fail_at=1).wait_until_ready(), prompt="a", stream=streamed)[0] == 500
    status, _, body = answer_of(launch(refuse="rejected").wait_until_ready(), prompt="a", stream=streamed)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
