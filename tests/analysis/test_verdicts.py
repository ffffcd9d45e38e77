"""Signs that a measurement is not what it looks like: each seen where it is, and silent where it is not."""

from typing import Any

import pytest
from msgspec.structs import replace

from biphase.analysis.verdicts import foreign_traffic, verdicts
from biphase.client.record import Chunk, Record


def record(tokens: tuple[int, ...] = (1, 1, 1, 1), **more: Any) -> Record:
    chunks = tuple(Chunk(1.0 + i, n, "text") for i, n in enumerate(tokens))
    counts = {"prompt_tokens": 64, "asked_prompt_tokens": 64, "completion_tokens": 4, "asked_completion_tokens": 4}
    known = {"completion_tokens_source": "usage", "cached_tokens": 0, **counts, **more}
    return Record(id="r", intended=0.0, sent=0.0, chunks=chunks, **known)


def warnings(records: list[Record], own_tokens: int = 0) -> list[str]:
    """The sentences of all verdicts but the one on too few samples, which every short list deserves."""
    return [v.sentence for v in verdicts(records, own_tokens) if v.name != "too-few-samples"]


def test_good_records_give_no_warning() -> None:
    assert warnings([record(), record(cached_tokens=None), record(completion_tokens_source="continuous_usage")]) == []


def test_early_eos() -> None:
    (line,) = warnings([record(), record((1, 1), completion_tokens=2)])
    assert line.startswith("1 of 2 answers ended early, the shortest after 2 of 4 tokens")


@pytest.mark.parametrize(
    ("source", "how"), [("continuous_usage", "counted by the server"), ("usage", "spread over the chunks")]
)
def test_chunks_of_several_tokens(source: str, how: str) -> None:
    (line,) = warnings([record((1, 3), completion_tokens_source=source), record()])
    assert "2.00 tokens a chunk in 1 of 2 answers" in line
    assert how in line


def test_counts_that_are_a_guess() -> None:
    (line,) = warnings([record(completion_tokens_source="chunks")])
    assert "reports no token counts" in line


def test_a_prefix_cache_that_answered() -> None:
    (line,) = warnings([record(cached_tokens=48), record()])
    assert "in 1 of 2 requests (up to 48 of 64 prompt tokens)" in line


@pytest.mark.parametrize(("cached", "own"), [(1, 0), (9, 9), (10, 9)])
def test_the_servers_own_tokens_may_be_cached_and_one_more_by_chance(cached: int, own: int) -> None:
    assert warnings([record(cached_tokens=cached)], own) == []


def test_prompts_of_another_length() -> None:
    (line,) = warnings([record(prompt_tokens=65), record()])
    assert "65 tokens counted for 64" in line
    assert "cut" not in line
    (line,) = warnings([record(prompt_tokens=32)])
    assert "it seems to cut long prompts" in line


def test_times_that_scatter() -> None:
    def at(first: float) -> Record:
        return replace(record(), chunks=(Chunk(first, 1, "text"), *record().chunks[1:]))

    assert warnings([at(t) for t in (0.10, 0.11, 0.12, 0.10, 0.11)]) == []
    (line,) = warnings([at(t) for t in (0.10, 0.30, 0.11, 0.25, 0.12)])  # quartiles 0.11 and 0.25, median 0.12
    assert "varies by 58 %" in line
    assert "prompt of 64" in line


def named(records: list[Record]) -> dict[str, str]:
    return {v.name: v.sentence for v in verdicts(records)}


def timed(first: float, *gaps: float, sent: float = 0.0, length: int = 200, **more: Any) -> Record:
    """A record whose first token comes ``first`` seconds after sending, then the gaps."""
    stamps = [sent + first]
    for gap in gaps:
        stamps.append(stamps[-1] + gap)
    known = {"prompt_tokens": length, "asked_prompt_tokens": length, "completion_tokens_source": "usage", **more}
    chunks = (*known.pop("before", ()), *(Chunk(t, 1, "text") for t in stamps))
    tokens = len(stamps)
    counts = {"completion_tokens": tokens, "asked_completion_tokens": tokens}
    return Record(id="r", intended=sent, sent=sent, chunks=chunks, **counts, **known)


STEADY = (0.010,) * 30


def test_a_quiet_run_has_no_verdict_at_all() -> None:
    assert named([timed(0.1, *STEADY, sent=float(i)) for i in range(12)]) == {}


def test_a_prompt_that_cannot_have_been_computed() -> None:
    """30 ms where the others need 100: less than 0.4 of the median. A short prompt proves nothing."""
    slow = [timed(0.1, *STEADY, sent=float(i)) for i in range(4)]
    assert "a prompt of 200 in 30.0 ms" in named([*slow, timed(0.03, *STEADY)])["impossible-prefill"]
    short = [timed(t, *STEADY, length=16) for t in (0.1, 0.1, 0.1, 0.1, 0.03)]
    assert "impossible-prefill" not in named(short)


def test_a_role_chunk_far_before_the_first_token() -> None:
    early = [timed(0.1, *STEADY, before=(Chunk(0.02, 0, "role"),)) for _ in range(5)]
    assert "reports a TTFT of 20.0 ms instead of 100.0 ms" in named(early)["role-chunk"]
    close = [timed(0.1, *STEADY, before=(Chunk(0.09, 0, "role"),)) for _ in range(5)]
    assert "role-chunk" not in named(close)


@pytest.mark.parametrize(("lag", "seen"), [(0.0011, True), (0.0009, False)])
def test_a_client_that_lags_by_a_tenth_of_the_itl(lag: float, seen: bool) -> None:
    found = named([timed(0.1, *STEADY, client_lag=lag) for _ in range(5)])
    assert ("client-lag" in found) is seen


def test_a_proxy_that_sends_in_bursts() -> None:
    """Of ten chunks one comes after 100 ms and nine with it."""
    burst = [timed(0.1, *((0.1,) + (1e-5,) * 9) * 3) for _ in range(5)]
    assert "90 % of the chunks arrive with the one before" in named(burst)["buffered-stream"]
    at_once = [timed(0.5, *(1e-5,) * 30) for _ in range(5)]
    assert "arrive at once" in named(at_once)["buffered-stream"]


def test_a_machine_that_slows_down() -> None:
    """ITL of 10 ms that becomes 13 ms in the last third of eighteen requests, of two lengths in turn."""
    paces = [0.010] * 12 + [0.013] * 6
    run = [timed(0.1, *(pace,) * 30, sent=float(i), length=200 + i % 2) for i, pace in enumerate(paces)]
    assert "decode became 30 % slower" in named(run)["drift"]


def test_too_few_samples() -> None:
    assert "2 requests at one length and 60" in named([timed(0.1, *STEADY), timed(0.1, *STEADY)])["too-few-samples"]


@pytest.mark.parametrize(
    ("foreign", "busy", "words"),
    [
        (None, None, None),
        (0, 0, None),
        (10, 0, None),  # 1 % of 1000: what a probe beside may take
        (-3, None, None),
        (50, 0, "generated 50 tokens for others while it generated 1000"),
        (0, 2, "2 requests were running on the server before"),
    ],
)
def test_foreign_traffic(foreign: int | None, busy: int | None, words: str | None) -> None:
    found = foreign_traffic(foreign, 1000, busy)
    assert (found is None) if words is None else (found is not None and words in found.sentence)


def test_every_verdict_says_what_to_do() -> None:
    shown = verdicts([record((1, 3), completion_tokens=3, prompt_tokens=32, cached_tokens=20)])
    assert {v.name for v in shown} >= {"prefix-cache", "early-eos", "chunk-is-not-token", "prompt-length"}
    assert all(len(v.advice) > 10 for v in shown)
