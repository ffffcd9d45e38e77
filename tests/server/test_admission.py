"""What the server refuses, and with which words; and what it makes of what it takes."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.engine.text import Text
from biphase.scheduling.request import LogitRules
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
    assert complete(model, prompt=prompt).submits[0].prompt == (104, 105)


def test_defaults_are_those_of_the_api(model: ServedModel) -> None:
    submit = complete(model, prompt="hi", stop=None, temperature=None).submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, submit.max_tokens) == (1.0, 1.0, 0, 16)
    assert submit.stop_ids == {257}
    assert complete(model, prompt="hi", ignore_eos=True).submits[0].stop_ids == frozenset()
    assert chat(model, messages=USER).submits[0].max_tokens == LIMIT - len("u:hi;a:")
    assert complete(model, prompt="x" * 60).submits[0].max_tokens == 4


def test_a_seed_is_kept_and_without_one_each_request_draws_its_own(model: ServedModel) -> None:
    assert complete(model, prompt="a", seed=5).submits[0].sampling.seed == 5
    seeds = {complete(model, prompt="a").submits[0].sampling.seed for _ in range(5)}
    assert len(seeds) == 5


def test_a_chat_goes_through_the_template(model: ServedModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    messages += [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}, *USER]
    assert bytes(chat(model, messages=messages).submits[0].prompt) == b"s:s;u:a\nb;a:x;u:hi;a:"


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
        {"min_tokens": 0},
        {"min_p": 0},
        {"n": None},
        {"response_format": {"type": "text"}},
        {"priority": 0},
    ],
)
def test_values_that_change_nothing_are_taken(model: ServedModel, neutral: dict[str, Any]) -> None:
    assert complete(model, prompt="hi", **neutral).submits[0].prompt == (104, 105)


def test_values_that_change_nothing_leave_the_fast_path_of_sampling(model: ServedModel) -> None:
    fields = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0, "logprobs": None}
    sampling = complete(model, prompt="hi", **fields).submits[0].sampling
    assert (sampling.rules, sampling.logprobs) == (None, None)


def test_rules_reach_the_engine_as_they_were_asked(model: ServedModel) -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25, "min_tokens": 3}
    submit = complete(model, prompt="hi", logit_bias={"7": -100, "5": 2.5}, min_p=0.1, **fields).submits[0]
    assert submit.sampling.rules == LogitRules(1.25, 0.5, -1.0, ((5, 2.5), (7, -100.0)), 3)
    assert submit.sampling.min_p == 0.1


def test_stop_token_ids_join_the_ends_of_sequence_and_stay_with_ignore_eos(model: ServedModel) -> None:
    assert complete(model, prompt="hi", stop_token_ids=[5]).submits[0].stop_ids == {5, 257}
    assert complete(model, prompt="hi", stop_token_ids=[5], ignore_eos=True).submits[0].stop_ids == {5}


def test_n_answers_count_the_seed_up_and_a_list_of_prompts_comes_in_order(model: ServedModel) -> None:
    submits = complete(model, prompt=["a", [98, 99]], n=2, seed=2**63 - 1).submits
    assert [submit.prompt for submit in submits] == [(97,), (97,), (98, 99), (98, 99)]
    assert [submit.id for submit in submits] == ["id-0", "id-1", "id-2", "id-3"]
    assert [submit.sampling.seed for submit in submits] == [2**63 - 1, 0, 2**63 - 1, 0]
    assert complete(model, prompt=["a"]).submits[0].id == "id"


def test_logprobs_of_chat_are_a_switch_and_a_count(model: ServedModel) -> None:
    def count(**fields: Any) -> int | None:
        return chat(model, messages=USER, **fields).submits[0].sampling.logprobs

    assert (count(), count(logprobs=False), count(logprobs=True)) == (None, None, 0)
    assert count(logprobs=True, top_logprobs=4) == 4
    with pytest.raises(ApiError, match="only allowed when logprobs is true"):
        count(top_logprobs=2)


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"prompt": "a", "n": 0}, "n", "n=0"),
        ({"prompt": "a", "n": 257}, "n", "1 to 256"),
        ({"prompt": ["a", "b"], "n": 129}, "n", "each of 2 prompts"),
        ({"prompt": "a", "n": True}, "n", "expected an integer or null, got true or false"),
        ({"prompt": "a", "n": 2.5}, "n", "an integer or null, got a number"),
        ({"prompt": "a", "best_of": 3}, "best_of", "best_of=3"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "0 to 20"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "-1"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "logprobs"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens (4)"),
        ({"prompt": "a", "min_tokens": -1}, "min_tokens", "-1"),
        ({"prompt": "a", "min_p": 1.5}, "min_p", "0 to 1"),
        ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty", "-2 to 2"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
        ({"prompt": "a", "temperature": 1e30}, "temperature", "0 to 100"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", '"x"'),
        ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "0 to 299"),
        ({"prompt": "a", "logit_bias": {"01": 1}}, "logit_bias", '"01"'),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", '"-1"'),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"prompt": "a", "logit_bias": {"1": "2"}}, "logit_bias", "got a string"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias", "an object or null, got a list"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids", "300"),
        ({"prompt": "a", "priority": 2**31}, "priority", "32 bits"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format", "missing"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "type: x",
        ),
        (
            {"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "beside a response_format",
        ),
        ({"prompt": "a", "echo": True}, "echo", "echo=true"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "2.5"),
        ({"prompt": "a", "guided_json": {}}, "guided_json", "guided_json"),
        ({"prompt": "a", "stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "foo"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt": "a", "model": "other"}, "model", "'tiny'"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": [1, "b"]}, "prompt", "list of lists"),
        ({"prompt": [[1], 2]}, "prompt", "list of lists"),
        ({"prompt": [[1], [300]]}, "prompt", "300"),
        ({"prompt": ["a"] * 257}, "prompt", "257 prompts"),
        ({"prompt": [1, 300]}, "prompt", "300"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [10**30]}, "prompt", "0 to 299"),
        ({"prompt": 5}, "prompt", "a string or a list, got an integer"),
        ({"prompt": {"a": 1}}, "prompt", "object"),
        ({}, None, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a", "max_tokens": -3}, "max_tokens", "-3"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "got a number"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "got a string"),
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
        ({"prompt": "a", "stop": 5}, "stop", "a string or a list or null, got an integer"),
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
        assert all(0 < len(submit.prompt) + submit.max_tokens <= LIMIT for submit in admitted.submits)
        assert len({submit.id for submit in admitted.submits}) == len(admitted.submits)
