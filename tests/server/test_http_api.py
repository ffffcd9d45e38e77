"""The HTTP API over real sockets, in front of the scripted engine, which answers a prompt with itself."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from calling import get, post, stream, usage, with_client
from running_server import Server, wait_for


def test_a_completion_ends_with_its_sequence_and_counts_every_token(server: Server) -> None:
    status, body = post(server.url + "/v1/completions", {"prompt": "hé", "max_tokens": 10})
    assert status == 200
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("hé", "stop", 0)
    assert body["usage"] == usage(3, 4)
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["id"].startswith("cmpl-")


def test_ignore_eos_runs_to_max_tokens(server: Server) -> None:
    _, body = post(server.url + "/v1/completions", {"prompt": "abc", "max_tokens": 7, "ignore_eos": True})
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abcabca", "length")
    assert body["usage"]["completion_tokens"] == 7


def test_a_chat_answers_as_the_assistant(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, body = post(server.url + "/v1/chat/completions", {"messages": messages, "model": "tiny"})
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "u:hi;a:"}
    assert (body["object"], body["usage"]["prompt_tokens"]) == ("chat.completion", 7)


def test_a_stream_of_a_completion_has_a_chunk_for_each_token(server: Server) -> None:
    chunks = stream(server.url + "/v1/completions", prompt="abc", max_tokens=3, ignore_eos=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_of_a_chat_says_the_role_first_and_the_usage_last(server: Server) -> None:
    options = {"include_usage": True}
    messages = [{"role": "user", "content": "x"}]
    chunks = stream(server.url + "/v1/chat/completions", messages=messages, max_tokens=2, stream_options=options)
    *parts, last = chunks
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "u"},
        {"content": ":"},
    ]
    assert [part["usage"] for part in parts] == [None] * 3
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"] == usage(6, 2)


def test_continuous_usage_counts_tokens_that_show_no_text_yet(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server.url + "/v1/completions", prompt="€x", max_tokens=4, stream_options=options, ignore_eos=True)
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert texts == ["", "", "€", "x"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


def test_stream_options_that_ask_for_nothing_give_no_usage(server: Server) -> None:
    chunks = stream(server.url + "/v1/completions", prompt="ab", max_tokens=2, stream_options={})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_a_stop_string_across_tokens_ends_the_answer_and_frees_the_engine(server: Server) -> None:
    url = server.url + "/v1/completions"
    request = {"prompt": "one two three", "max_tokens": 40, "stop": ["zz", " th", "eee"], "ignore_eos": True}
    _, whole = post(url, request)
    chunks = stream(url, **request)
    assert whole["choices"][0]["text"] == "one two" == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", " th")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len("one two th")
    wait_for(lambda: {whole["id"], chunks[0]["id"]} <= aborted(server))


def test_a_stop_string_at_once_gives_an_empty_answer(server: Server) -> None:
    _, body = post(server.url + "/v1/completions", {"prompt": "abc", "max_tokens": 4, "stop": "a"})
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert body["usage"]["completion_tokens"] == 1


def aborted(server: Server) -> set[str]:
    return {frame["id"] for frame in server.frames() if frame["type"] == "Abort"}


def submitted(server: Server) -> list[str]:
    return [frame["id"] for frame in server.frames() if frame["type"] == "Submit"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: Server, streamed: bool) -> None:
    before = len(submitted(server))

    async def leave(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": streamed}
        sending = asyncio.create_task(session.post(server.url + "/v1/completions", json=body))
        await asyncio.to_thread(wait_for, lambda: len(submitted(server)) > before)
        if streamed:
            response = await sending
            await response.content.readline()
            response.close()
        sending.cancel()

    with_client(leave)
    wait_for(lambda: submitted(server)[before] in aborted(server), seconds=2)


def test_a_client_that_goes_away_while_its_request_waits_frees_it(launch: Callable[..., Server]) -> None:
    """The engine never gives this request a token: nothing but the client's leaving can be noticed."""
    server = launch(hang_at=1).wait_until_ready()

    async def leave(session: aiohttp.ClientSession) -> None:
        sending = asyncio.create_task(session.post(server.url + "/v1/completions", json={"prompt": "a"}))
        await asyncio.to_thread(wait_for, lambda: bool(submitted(server)))
        sending.cancel()

    with_client(leave)
    wait_for(lambda: aborted(server) == set(submitted(server)))


def test_an_ended_request_is_not_aborted(server: Server) -> None:
    _, body = post(server.url + "/v1/completions", {"prompt": "ab", "max_tokens": 1})
    assert body["id"] in submitted(server)
    assert body["id"] not in aborted(server)


def test_many_streams_at_once_keep_their_texts_apart(server: Server) -> None:
    prompts = [f"request {number} says {number * 7}" for number in range(40)]

    async def work(session: aiohttp.ClientSession) -> list[str]:
        async def one(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 40}
            async with session.post(server.url + "/v1/completions", json=body) as response:
                answer: str = (await response.json())["choices"][0]["text"]
                return answer

        return list(await asyncio.gather(*map(one, prompts)))

    assert with_client(work) == prompts


def test_sampling_reaches_the_engine(server: Server) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11}
    _, body = post(server.url + "/v1/completions", {"prompt": "ab", "max_tokens": 1, **fields})
    frame = next(frame for frame in server.frames() if frame["id"] == body["id"])
    assert {name: frame["sampling"][name] for name in fields} == fields
    assert (frame["prompt"], frame["max_tokens"], frame["stop_ids"]) == ([97, 98], 1, [257])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "frobnicate": 1}, "frobnicate"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-5"}, "model"),
        ("/v1/completions", {"prompt": "a" * 100}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/v1/completions", b"\xff\xfe", None),
        ("/v1/completions", b"[" * 200_000, None),
        ("/v1/completions", b"x" * 10_000_000, None),
        ("/tokenize", {"model": "tiny"}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
    ],
)
def test_bad_input_is_answered_400_in_the_api_s_shape(server: Server, path: str, body: Any, param: str | None) -> None:
    status, answer = post(server.url + path, body)
    assert status == 400
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_unknown_paths_and_methods_are_answered_in_the_api_s_shape(server: Server) -> None:
    status, text = get(server.url + "/v1/embeddings")
    assert (status, json.loads(text)["error"]["type"]) == (404, "invalid_request_error")
    assert get(server.url + "/v1/completions")[0] == 405
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server.url + "/v1/completions")
    assert refused.value.headers["allow"] == "POST"


def test_models_health_tokenize_detokenize(server: Server) -> None:
    models = json.loads(get(server.url + "/v1/models")[1])
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("tiny", 64)]
    assert get(server.url + "/health")[0] == 200
    assert post(server.url + "/tokenize", {"prompt": "ab"})[1] == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [97, 98],
    }
    chat = post(server.url + "/tokenize", {"messages": [{"role": "user", "content": "b"}]})[1]
    assert bytes(chat["tokens"]) == b"u:b;a:"
    assert post(server.url + "/detokenize", {"tokens": [97, 257]})[1] == {"prompt": "a<eos>"}


def test_metrics_count_prompts_and_tokens(launch: Callable[..., Server]) -> None:
    server = launch().wait_until_ready()
    for _ in range(3):
        post(server.url + "/v1/completions", {"prompt": "abcd", "max_tokens": 2, "ignore_eos": True})
    text = get(server.url + "/metrics")[1]
    labels = '{engine="0",model_name="tiny"}'
    for line in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running"):
        assert line + labels in text
    assert f"vllm:prompt_tokens_total{labels} 12.0" in text
    assert f"vllm:generation_tokens_total{labels} 6.0" in text
    assert f"vllm:kv_cache_usage_perc{labels} 0.0" in text


def test_gauges_follow_the_engine_while_requests_run(launch: Callable[..., Server]) -> None:
    server = launch(hang_at=2).wait_until_ready()

    async def work(session: aiohttp.ClientSession) -> str:
        sending = asyncio.create_task(session.post(server.url + "/v1/completions", json={"prompt": "abc"}))
        text = ""
        while "num_requests_running{" not in text or "kv_cache_usage_perc{" not in text or " 0.25" not in text:
            async with session.get(server.url + "/metrics") as response:
                text = await response.text()
        sending.cancel()
        return text

    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0' in with_client(work)
    wait_for(lambda: 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in get(server.url + "/metrics")[1])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_fails_in_the_engine_fails_alone(launch: Callable[..., Server], streamed: bool) -> None:
    server = launch(fail_at=3).wait_until_ready()
    url = server.url + "/v1/completions"
    if streamed:
        *_, last = stream(url, prompt="abcd")
        assert "not finite" in last["error"]["message"]
    else:
        status, body = post(url, {"prompt": "abcd"})
        assert (status, body["error"]["type"]) == (500, "server_error")
    assert post(url, {"prompt": "a"})[0] == 200
