"""What the server refuses, and with which words; and what it makes of what it takes."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.engine.text import Text
from biphase.server.admission import Admitted, ServedModel, admit_chat, admit_completion
from biphase.server.errors import ApiError
from biphase.server.protocol import ChatRequest, CompletionRequest, read_body

LIMIT = 64


@pytest.fixture(scope="session")
def model(byte_text: Text) -> ServedModel:
    return ServedModel("tiny", byte_text, LIMIT, 300)


def complete(model: ServedModel, /, **fields: Any) -> Admitted:
    return admit_completion(read_body(json.dumps(fields).encode(), CompletionRequest), model, "id")


def chat(model: ServedModel, /, **fields: Any) -> Admitted:
    return admit_chat(read_body(json.dumps(fields).encode(), ChatRequest), model, "id")


def refusal(raw: bytes, model: ServedModel) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admit_completion(read_body(raw, CompletionRequest), model, "id")
    assert caught.value.status == 400
    json.dumps(caught.value.body(), allow_nan=False)
    return caught.value


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_a_prompt_is_text_or_ids_or_a_list_of_one(model: ServedModel, prompt: Any) -> None:
    assert complete(model, prompt=prompt).submit.prompt == (104, 105)


def test_defaults_are_those_of_the_api(model: ServedModel) -> None:
    submit = complete(model, prompt="hi", stop=None, temperature=None).submit
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, submit.max_tokens) == (1.0, 1.0, 0, 16)
    assert submit.stop_ids == {257}
    assert complete(model, prompt="hi", ignore_eos=True).submit.stop_ids == frozenset()
    assert chat(model, messages=USER).submit.max_tokens == LIMIT - len("u:hi;a:")
    assert complete(model, prompt="x" * 60).submit.max_tokens == 4


def test_a_seed_is_kept_and_without_one_each_request_draws_its_own(model: ServedModel) -> None:
    assert complete(model, prompt="a", seed=5).submit.sampling.seed == 5
    seeds = {complete(model, prompt="a").submit.sampling.seed for _ in range(5)}
    assert len(seeds) == 5


def test_a_chat_goes_through_the_template(model: ServedModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    messages += [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}, *USER]
    assert bytes(chat(model, messages=messages).submit.prompt) == b"s:s;u:a\nb;a:x;u:hi;a:"


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"best_of": 1},
        {"echo": False},
        {"logprobs": None},
        {"logprobs": False},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"user": "someone"},
        {"suffix": None},
        {"repetition_penalty": 1.0},
        {"top_k": -1},
    ],
)
def test_values_that_change_nothing_are_taken(model: ServedModel, neutral: dict[str, Any]) -> None:
    assert complete(model, prompt="hi", **neutral).submit.prompt == (104, 105)


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"prompt": "a", "n": 2}, "n", "n=2"),
        ({"prompt": "a", "n": True}, "n", "n=true"),
        ({"prompt": "a", "logprobs": 5}, "logprobs", "logprobs=5"),
        ({"prompt": "a", "echo": True}, "echo", "echo=true"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "0.5"),
        ({"prompt": "a", "guided_json": {}}, "guided_json", "guided_json"),
        ({"prompt": "a", "stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "foo"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt": "a", "model": "other"}, "model", "'tiny'"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", "b"]}, "prompt", "2 prompts"),
        ({"prompt": [1, "b"]}, "prompt", "2 prompts"),
        ({"prompt": [[1], [2]]}, "prompt", "2 prompts"),
        ({"prompt": [1, 300]}, "prompt", "300"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [10**30]}, "prompt", "0 to 299"),
        ({"prompt": 5}, "prompt", "int"),
        ({"prompt": {"a": 1}}, "prompt", "object"),
        ({}, None, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a", "max_tokens": -3}, "max_tokens", "-3"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "float"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "str"),
        ({"prompt": "a", "max_tokens": 64}, "max_tokens", "at most 63"),
        ({"prompt": "a", "max_tokens": 10**40}, "max_tokens", "64"),
        ({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "disagree"),
        ({"prompt": "a" * 64}, "prompt", "64 tokens"),
        ({"prompt": "a" * 70}, "prompt", "70 tokens and the context holds 64"),
        ({"prompt": "a" * 10**6}, "prompt", "at least 200000 tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", "-0.1"),
        ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a", "top_p": 1.01}, "top_p", "1.01"),
        ({"prompt": "a", "top_k": -2}, "top_k", "-2"),
        ({"prompt": "a", "seed": 2**63}, "seed", "64 bits"),
        ({"prompt": "a", "stop": ""}, "stop", "empty"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "17"),
        ({"prompt": "a", "stop": "x" * 1025}, "stop", "1024"),
        ({"prompt": "a", "stop": 5}, "stop", "int"),
    ],
)
def test_a_refusal_names_the_field_and_what_is_wrong(
    model: ServedModel, fields: dict[str, Any], param: str | None, part: str
) -> None:
    error = refusal(json.dumps(fields).encode(), model)
    assert (error.param.split("[")[0] if error.param else None) == param
    assert part in error.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b'{"prompt": "a"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "logit_bias": ' + b"[" * 100_000,
        b'{"prompt": "a", "logit_bias": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "' + b"x" * 10_000 + b'": 1}',
    ],
)
def test_bodies_that_are_no_request_are_refused_in_a_line(model: ServedModel, raw: bytes) -> None:
    assert len(refusal(raw, model).message) < 400


def test_codes_are_those_that_clients_look_for(model: ServedModel) -> None:
    assert refusal(b'{"prompt": "a", "model": "b"}', model).code == "model_not_found"
    assert refusal(b'{"prompt": "a", "max_tokens": 100}', model).code == "context_length_exceeded"
    assert refusal(json.dumps({"prompt": "a" * 100}).encode(), model).code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "pirate", "content": "a"}], "messages[0].role"),
        ([*USER, {"role": "tool", "content": "a"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "user", "content": "a", "weight": 1}], "messages[0].weight"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ("hi", "messages"),
    ],
)
def test_a_wrong_message_is_named_by_its_place(model: ServedModel, messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(model, messages=messages)
    assert (caught.value.status, caught.value.param) == (400, param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*CompletionRequest.__struct_fields__, "unknown"]


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), JSON)
def test_any_json_is_admitted_or_refused(model: ServedModel, fields: dict[str, Any], prompt: Any) -> None:
    with contextlib.suppress(ApiError):  # any other exception fails
        admitted = complete(model, **{"prompt": prompt, **fields})
        assert 0 < len(admitted.submit.prompt) + admitted.submit.max_tokens <= LIMIT
