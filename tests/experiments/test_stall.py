"""``biphase stall`` as an experiment, against servers whose behaviour is known."""

import asyncio
import json
import urllib.request
from typing import Any

import aiohttp
import pytest

from biphase.analysis.stall_result import ServerStall
from biphase.client.endpoint import Access
from biphase.client.record import Record, RunFacts
from biphase.errors import RunFailed
from biphase.experiments.stall import Run, StallPlan, measure, told_limit
from tests.law_server import law_server
from tests.scripted_server import scripted
from tests.slot_server import slot_server
from tests.timing import holds_when_undisturbed

PLAN = StallPlan(victims=3, prompt=1500, repeats=2)
QUICK = {"first_token_s": 0.006, "gap_s": 0.003}
LAWS: dict[str, Any] = {"a": 15.0, "b": 0.05, "c": 1e-6, "t0": 4.0, "w": 0.25, "k": 5e-5}
"""Half of the law server's own times: counting raised gaps needs their ratios alone."""


@pytest.fixture(autouse=True)
def few_steps_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 steps are left to the streams in case the server becomes twice as fast: these keep to their laws."""
    monkeypatch.setattr("biphase.experiments.stall.AFTER_STEPS", 16)


def stall(url: str, plan: StallPlan = PLAN, kept: list[Record | RunFacts] | None = None, **access: Any) -> ServerStall:
    run = Run((kept if kept is not None else []).append, lambda done, total, what: None, "0", ["biphase", "stall"])
    return asyncio.run(measure(url, None, Access(**access), plan, "A", run))


def named(found: ServerStall) -> set[str]:
    return {verdict.name for verdict in found.verdicts}


@pytest.mark.parametrize("chunk", [190, 300, 512])
def test_the_chunk_size_of_a_server_with_known_laws(chunk: int) -> None:
    """Within 10 %: a miscount of one pass is what noise can do, and the counts of all prompts must agree."""

    def check() -> None:
        with law_server(**LAWS | {"chunk": chunk, "a": 10.0}) as url:
            found = stall(url)
        assert found.chunking is not None
        assert found.chunking.chunk_tokens == pytest.approx(chunk, rel=0.1)
        assert found.chunking.single_size

    holds_when_undisturbed(check)


def test_a_whole_prompt_stops_the_streams_for_as_long_as_the_law_says() -> None:
    """30 + 0.1 * 1500 + 2e-6 * 1500^2 = 184.5 ms, and the decode step of three streams, about 9.5 ms, beside it."""

    def check() -> None:
        with law_server() as url:
            found = stall(url)
        assert found.error is None
        assert found.victims == 3
        assert found.prompt_tokens == 1500
        assert found.attacks == 2
        assert found.quiet_gap_ms is not None
        assert found.quiet_gap_ms.median == pytest.approx(9.5, rel=0.1)
        assert found.prefill_gap_ms is not None
        assert found.prefill_gap_ms.worst == pytest.approx(194, rel=0.1)
        assert found.stalled_s_per_stream is not None
        assert found.stalled_s_per_stream.median == pytest.approx(0.1845, rel=0.1)
        assert found.ttft_ms is not None
        assert 184 <= found.ttft_ms.median <= 215
        assert found.chunking is not None
        assert found.chunking.chunk_tokens is None
        assert not named(found) & {"streams-ended", "streams-not-decoding", "few-slots", "foreign-traffic"}

    holds_when_undisturbed(check)


def test_advice_keeps_what_the_server_would_do() -> None:
    """A pass of C tokens takes 30 + 0.1 C + about 1 ms; the wanted 60 ms leave 260 to 300 tokens."""

    def check() -> None:
        with law_server(chunk=150, a=30, b=0.1, c=0.0, t0=4.0, w=0.25, k=0.0) as url:
            found = stall(url, StallPlan(3, 1500, 2, itl_slo_ms=60.0))
        assert found.advice is not None
        assert found.advice.chunk_tokens is not None
        assert found.advice.chunk_tokens.value == pytest.approx(290, rel=0.2)
        assert found.advice.worst_gap_ms == pytest.approx(45, rel=0.2)

    holds_when_undisturbed(check)


def test_records_and_facts_are_kept_as_they_come() -> None:
    kept: list[Record | RunFacts] = []
    with law_server(**LAWS) as url:
        stall(url, StallPlan(3, 300, 2), kept)
    assert isinstance(kept[0], RunFacts)
    assert isinstance(kept[-1], RunFacts)
    assert kept[-1].error is None
    ids = {line.id for line in kept if isinstance(line, Record)}
    assert {"warm-up-300", "quiet-3", "warm-up/prompt", "attack-1/prompt", "attack-2/stream-2"} <= ids


def test_prompts_are_never_the_same() -> None:
    with scripted(**QUICK, usage="continuous") as url:
        stall(url, StallPlan(2, 100, 1))
        bodies = json.load(urllib.request.urlopen(f"{url}/sent"))["bodies"]
    starts = [body["prompt"][0] for body in bodies if isinstance(body["prompt"], list)]
    assert len(starts) > 8
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("told", [{"max_model_len": 600}, {"refuses_longer_than": 600}])
def test_the_prompt_is_shortened_to_the_servers_limit(told: dict[str, int]) -> None:
    """Listed with the model, or named in the refusal: 600 tokens less the 4 of the answer."""
    with scripted(**QUICK, usage="continuous", **told) as url:
        found = stall(url, StallPlan(2, 5000, 1))
    assert found.error is None
    assert (found.asked_prompt_tokens, found.prompt_tokens) == (5000, 596)
    assert found.notes[0].startswith("the prompt is shortened from 5,000 to 596 tokens: the server")


def test_a_limit_that_is_not_named_is_found_by_halves() -> None:
    """1,000 and 500 are too long; 250 is not."""
    with scripted(**QUICK, usage="continuous", refuses_longer_than=400, names_the_field=False) as url:
        found = stall(url, StallPlan(2, 1000, 1))
    assert found.error is None
    assert found.prompt_tokens == 250
    assert "shortened from 1,000 to 250 tokens" in found.notes[0]


def test_a_server_that_takes_no_prompt_at_all() -> None:
    with scripted(**QUICK, refuses_longer_than=40, names_the_field=False) as url:
        found = stall(url, StallPlan(2, 200, 1))
    assert found.error is not None
    assert "takes no prompt of 100 tokens" in found.error


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ("http://h:8000/v1/completions: HTTP 400: maximum context length is 8192 tokens, you requested 16004", 8192),
        ("http://h/v1: HTTP 400: the request (16004 tokens) exceeds the available context size (4,096 tokens)", 4096),
        ("http://h:8000/v1/completions: HTTP 400: too long", None),
        ("http://h:8000/v1/completions: HTTP 413: at most 8 tokens", None),
    ],
)
def test_limits_in_refusals(message: str, limit: int | None) -> None:
    assert told_limit(message, 16000) == limit


def test_one_slot_is_said() -> None:
    """Streams follow each other; a thread that wakes late makes neighbours seem to overlap."""

    def check() -> None:
        with slot_server(slots=1, first_s=0.006, gap_s=0.003) as url:
            found = stall(url, StallPlan(2, 200, 1))
        assert found.error is None
        assert "one-slot" in named(found)
        assert found.victims == 1

    holds_when_undisturbed(check)


def test_fewer_slots_than_streams_leave_one_for_the_prompt() -> None:
    def check() -> None:
        with slot_server(slots=3, first_s=0.006, gap_s=0.003) as url:
            found = stall(url, StallPlan(6, 200, 1))
        assert "few-slots" in named(found)
        assert (found.asked_victims, found.victims) == (6, 2)

    holds_when_undisturbed(check)


def test_answers_that_end_early_are_no_lack_of_slots() -> None:
    """The model stops after 2 tokens, before the next stream begins: that is its own end."""
    with scripted(**QUICK, usage="continuous", stop_after=2) as url:
        found = stall(url, StallPlan(3, 100, 1))
    assert "few-slots" not in named(found)
    assert "one-slot" not in named(found)
    assert "early-eos" in named(found)


def test_a_server_that_dies_keeps_what_was_measured() -> None:
    """11 answers to negotiation, warm-up and quiet streams, then attacks of 3 requests each."""
    with slot_server(slots=8, first_s=0.006, gap_s=0.003, dies_after=12) as url:
        found = stall(url, StallPlan(2, 200, 5))
    assert found.error is not None
    assert "failed after" in found.error
    assert "closed the connection" in found.error or "no connection" in found.error


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ({"api_key": "secret"}, "HTTP 401"),
        ({"completions": False, "chat": False}, "HTTP 404"),
        ({"status": 500}, "HTTP 500: scripted refusal"),
    ],
)
def test_a_server_that_cannot_be_measured_raises(script: dict[str, Any], line: str) -> None:
    with scripted(**QUICK, **script) as url, pytest.raises(RunFailed, match=line):
        stall(url)


def test_a_rate_limit_is_waited_for() -> None:
    with scripted(**QUICK, usage="continuous", limited_requests=3) as url:
        found = stall(url, StallPlan(2, 100, 1))
    assert found.error is None
    assert found.attacks == 1


def test_a_prompt_served_from_a_cache_is_said() -> None:
    with scripted(**QUICK, cached=64) as url:
        found = stall(url, StallPlan(2, 100, 1))
    assert "prefix-cache" in named(found)


def test_other_traffic_is_said() -> None:
    """Another client decodes 200 tokens meanwhile; the server's counters tell."""

    async def both(url: str) -> ServerStall:
        async with aiohttp.ClientSession() as session:
            body = {"prompt": [5] * 10, "max_tokens": 400}

            async def other() -> None:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    await response.read()

            noise = asyncio.create_task(other())
            run = Run(lambda line: None, lambda done, total, what: None, "0")
            found = await measure(url, None, Access(), StallPlan(2, 300, 1), "A", run)
            noise.cancel()
            return found

    with law_server(**LAWS) as url:
        assert "foreign-traffic" in named(asyncio.run(both(url)))
