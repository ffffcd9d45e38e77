"""How a server wants to be asked: found out against scripted servers that refuse one thing or another."""

from typing import Any

import pytest

from biphase.client import clock
from biphase.client.endpoint import Access, Api, parse_url
from biphase.client.load import patient
from biphase.client.negotiation import Refusals, Target, open_target
from biphase.client.openai import OPTIONAL_FIELDS, Dialect, make_call
from biphase.client.prompts import ORDINARY_IDS, WORDS
from biphase.client.record import Record
from biphase.client.tokenize import LocalTokenizer
from biphase.errors import BadInput, RunFailed
from tests.scripted_server import hash_of, scripted

ALL = frozenset(OPTIONAL_FIELDS)
QUICK = {"first_token_s": 0.0, "gap_s": 0.0}


def negotiate(model: str | None = None, access: Access | None = None, path: str = "", **script: Any) -> Target:
    async def main(url: str) -> Target:
        async with open_target(parse_url(url + path), model, access or Access(timeout_s=5)) as target:
            return target

    with scripted(**QUICK, **script) as url:
        return clock.run(main(url))


def measured(length: int, **script: Any) -> Record:
    """The record of one prompt of ``length`` tokens, sent as negotiated."""

    async def main(url: str) -> Record:
        async with open_target(url, None, Access(timeout_s=5)) as target:
            prompt = target.prompts.make(length)
            call = make_call(target.dialect, "r", prompt.content, length, 4)
            return (await patient(target.session, call)).record

    with scripted(**QUICK, **script) as url:
        return clock.run(main(url))


def test_a_server_that_takes_everything_is_asked_for_everything() -> None:
    target = negotiate(usage="continuous", max_model_len=4096)
    assert (target.dialect.form, target.dialect.fields) == ("token_ids", ALL)
    assert target.api.max_model_len == 4096
    assert target.round_trip_path == "/health"
    assert len(target.round_trip_s) == 10
    assert target.notes == (f"prompts are token ids, drawn from {ORDINARY_IDS[0]} to {ORDINARY_IDS[-1]}",)


def test_token_ids_are_real_ones_where_the_server_has_a_tokenizer() -> None:
    note = negotiate(has_tokenize=True).notes[0]
    ids = {hash_of(word) for word in WORDS}
    assert note == f"prompts are token ids, drawn from the ids of {len(ids)} everyday words (the server's /tokenize)"


@pytest.mark.parametrize("field", ["ignore_eos", "continuous_usage_stats", "temperature", "stream_options"])
def test_a_refused_field_is_dropped_alone_and_named(field: str) -> None:
    target = negotiate(refuses=[field])
    assert (target.dialect.form, target.dialect.fields) == ("token_ids", ALL - {field})
    assert target.notes[-1] == f"the server refuses {field}: left out"


def test_two_refused_fields() -> None:
    target = negotiate(refuses=["ignore_eos", "temperature"])
    assert target.dialect.fields == ALL - {"ignore_eos", "temperature"}


def test_a_refusal_that_names_nothing_drops_what_is_no_standard_field() -> None:
    target = negotiate(refuses=["ignore_eos"], names_the_field=False)
    assert (target.dialect.form, target.dialect.fields) == ("token_ids", ALL - {"ignore_eos", "continuous_usage_stats"})


@pytest.mark.parametrize("named", [True, False])
def test_without_token_ids_prompts_are_text_of_exact_length(named: bool) -> None:
    script = {"refuses_ids": True, "names_the_field": named, "bos": 1, "two_token_words": WORDS[3:30:7]}
    target = negotiate(**script)
    assert (target.dialect.form, target.dialect.fields) == ("text", ALL)
    assert "1 tokens of each come from the server (BOS)" in target.notes[0]
    assert measured(40, **script).prompt_tokens == 40


def test_a_chat_only_server_gets_prompts_with_the_template_counted_in() -> None:
    target = negotiate(completions=False, template=9)
    assert target.dialect.form == "chat"
    assert target.prompts.shortest == 10
    assert "9 tokens of each come from the chat template" in target.notes[0]
    assert measured(40, completions=False, template=9).prompt_tokens == 40


def test_a_server_without_counts_says_so() -> None:
    target = negotiate(completions=False, usage="none")
    assert "one token a word is assumed" in target.notes[0]


def test_a_local_tokenizer_counts_what_the_server_does_not() -> None:
    """The scripted tokens are words; this tokenizer finds two in each word, so 40 tokens are 20 words."""
    local = LocalTokenizer(lambda text: [1, 2] * len(text.split()))

    async def main(url: str) -> tuple[Target, Record, Record]:
        async with open_target(url, None, Access(timeout_s=5), local) as target:
            prompt = target.prompts.make(40)
            call = make_call(target.dialect, "r", prompt.content, 40, 4)
            answer = await patient(target.session, call)
            return target, answer.record, await target.counted(answer)

    with scripted(**QUICK, completions=False, usage="none") as url:
        target, before, after = clock.run(main(url))
    assert "counted by --tokenizer" in target.notes[0]
    assert (before.completion_tokens, before.completion_tokens_source, before.prompt_tokens) == (4, "chunks", None)
    assert (after.completion_tokens, after.completion_tokens_source) == (8, "tokenizer")
    assert [chunk.tokens for chunk in after.token_chunks] == [2] * 4
    assert (after.prompt_tokens, after.prompt_tokens_source) == (40, "tokenizer")


def test_the_servers_counts_come_before_a_local_tokenizer() -> None:
    local = LocalTokenizer(lambda text: [0] * 1000)

    async def main(url: str) -> Record:
        async with open_target(url, None, Access(timeout_s=5), local) as target:
            prompt = target.prompts.make(12)
            return await target.counted(
                await patient(target.session, make_call(target.dialect, "r", prompt.content, 12, 4))
            )

    with scripted(**QUICK) as url:
        record = clock.run(main(url))
    assert (record.prompt_tokens, record.prompt_tokens_source) == (12, "usage")
    assert (record.completion_tokens, record.completion_tokens_source) == (4, "usage")


def test_max_completion_tokens_where_max_tokens_is_refused() -> None:
    refusals = Refusals()
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    refusals.learn(Dialect("b", "m", "chat"), 400, message)
    refusals.forms |= {"token_ids", "text"}
    dialect = next(refusals.candidates(Api("r", "b", "m")))
    assert b'"max_completion_tokens":4' in make_call(dialect, "r", "text", 1, 4).body


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_api_is_found_from_any_of_its_addresses(path: str) -> None:
    assert negotiate(path=path).dialect.base.endswith("/v1")


def test_a_base_path_before_v1() -> None:
    target = negotiate(prefix="/gateway/llm")
    assert target.dialect.base.endswith("/gateway/llm/v1")
    assert target.round_trip_path == "/gateway/llm/health"


def test_several_models_are_listed() -> None:
    with pytest.raises(BadInput, match="the server has 2 models: big, small; say which: --model NAME"):
        negotiate(models=["big", "small"])
    assert negotiate(models=["big", "small"], model="small").api.model == "small"


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with pytest.raises(BadInput, match=r"--model x: the server does not serve it; it lists big, small \(.*HTTP 404"):
        negotiate(models=["big", "small"], model="x", status=404)
    assert negotiate(models=["big:latest"], model="big").api.model == "big"  # a name that the server understands


def test_without_a_list_a_model_must_be_named() -> None:
    with pytest.raises(RunFailed, match="/v1/models: HTTP 404; is this the address of an OpenAI-compatible server"):
        negotiate(has_models=False)
    assert negotiate(has_models=False, model="named").api.model == "named"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ({"api_key": "secret"}, "HTTP 401: Incorrect API key provided; set BIPHASE_API_KEY or pass --api-key"),
        ({"completions": False, "chat": False}, "HTTP 404: no route"),
        ({"status": 500}, "HTTP 500: scripted refusal"),
        ({"status": 503}, "HTTP 503: scripted refusal"),
        ({"streams": False}, "did not stream"),
        ({"dies_after": 0}, "closed the connection|no connection"),
    ],
)
def test_what_cannot_be_mended_is_one_line(script: dict[str, Any], line: str) -> None:
    with pytest.raises(RunFailed, match=line) as raised:
        negotiate(**script)
    assert "\n" not in str(raised.value)


def test_the_key_and_other_headers_are_sent() -> None:
    access = Access({"Authorization": "Bearer secret"}, timeout_s=5)
    assert negotiate(api_key="secret", access=access).dialect.form == "token_ids"


def test_a_limited_rate_is_waited_for() -> None:
    assert negotiate(limited_requests=3).dialect.fields == ALL


def test_a_toy_vocabulary_is_not_left() -> None:
    assert negotiate(n_vocab=512).notes[0] == "prompts are token ids, drawn from 256 to 511"
    assert negotiate(n_vocab=49152).notes[0] == "prompts are token ids, drawn from 1000 to 9999"


def test_of_many_refusals_the_telling_one_is_shown() -> None:
    """Token ids, text and chat are all tried; the first answer says what is wrong, the last that a route is missing."""
    with pytest.raises(RunFailed, match="/v1/completions: HTTP 400: Unrecognized request argument: prompt"):
        negotiate(refuses=["prompt"], chat=False)
