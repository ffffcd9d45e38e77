"""OpenAI's own Python client, unchanged, against the running server."""

import asyncio
from collections.abc import Callable

import openai
import pytest
from running_server import Server

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
ECHO = "u:hi;a:"
"""What the scripted engine answers: the prompt as the chat template renders it."""


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=10)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ECHO, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ECHO
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 15


def test_the_stream_helper_puts_a_chat_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ECHO
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert len(final.choices[0].logprobs.content) == 8


def test_completions_several_prompts_stop_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["abcd", "xy"], n=2, max_tokens=3, stop=["c"], logprobs=1, seed=4, logit_bias={"5": 1}
    )
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "xy", "xy"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    assert answer.choices[2].logprobs is not None
    assert answer.choices[2].logprobs.tokens == ["x", "y", "<eos>"]


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="tiny", prompt="abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == [*ECHO, "<eos>"]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("u", -0.5), ("v", -1.5)]


def test_a_response_format_is_taken_and_reaches_the_engine(client: openai.OpenAI, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
    )
    frame = next(frame for frame in server.frames() if frame["id"] == answer.id)
    assert '"integer"' in frame["sampling"]["rules"]["grammar"]


def test_fields_beyond_openai_s_go_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=5, extra_body={"ignore_eos": True, "top_k": 3, "repetition_penalty": 1.1}
    )
    assert answer.choices[0].text == "abcab"


def test_async_streams_side_by_side(server: Server) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:

            async def one(text: str) -> str:
                stream = await client.completions.create(model="tiny", prompt=text, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            chat = await client.chat.completions.create(model="tiny", messages=MESSAGES)
            return [chat.choices[0].message.content or "", *await asyncio.gather(*map(one, ("abc", "de", "f")))]

    assert asyncio.run(main()) == [ECHO, "abc", "de", "f"]


def test_errors_are_the_client_s_own_exceptions(client: openai.OpenAI, launch: Callable[..., Server]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-1)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.completions.create(model="tiny", prompt="a", extra_body={"frobnicate": 1})
    keyed = launch(api_keys=["right"]).wait_until_ready()
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=keyed.url + "/v1", api_key="wrong", max_retries=0).models.list()
    full = launch(refuse="queue_full", retry_after=2).wait_until_ready()
    with pytest.raises(openai.RateLimitError) as limited:
        openai.OpenAI(base_url=full.url + "/v1", api_key="k", max_retries=0).completions.create(
            model="tiny", prompt="a", stream=True
        )
    assert limited.value.response.headers["retry-after"] == "2"
