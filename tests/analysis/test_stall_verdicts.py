"""Each sign that an attack did not show what it should, and its silence where all is well."""

import pytest
from msgspec.structs import replace

from biphase.analysis import stall_verdicts as verdicts
from biphase.analysis.stall import Attack
from biphase.analysis.stall_result import Asked, StallRecords, analyse_stall
from biphase.analysis.verdicts import Verdict
from biphase.client.record import RunFacts
from tests.analysis.stall_records import attack, record

FACTS = RunFacts(
    command="biphase stall http://127.0.0.1:8000",
    versions={"biphase": "0.1"},
    started="2026-01-02T03:04:05+00:00",
    url="http://127.0.0.1:8000/v1",
    model="m",
    tokens=1000,
    repeats=3,
    own_tokens=0,
    http_round_trip_s=(0.001,),
    http_round_trip_path="/health",
    notes=(),
)


def names(found: list[Verdict]) -> set[str]:
    return {verdict.name for verdict in found}


def test_nothing_is_said_of_a_clean_run() -> None:
    attacks = [attack(1000, [0.3], victims=4) for _ in range(3)]
    quiet = [record(f"q-{n}", 0.0, [0.1 + 0.01 * i for i in range(48)], 32) for n in range(5)]
    assert verdicts.stall_verdicts(4, None, FACTS, quiet, attacks, [attacks[0].prompt]) == []


def test_slots() -> None:
    assert verdicts.few_slots(8, None) is None
    one, four = verdicts.few_slots(8, 1), verdicts.few_slots(8, 4)
    assert one is not None
    assert four is not None
    assert (one.name, four.name) == ("one-slot", "few-slots")
    assert "one request at a time" in one.sentence
    assert "3 were used instead of 8" in four.sentence


def test_streams_that_had_not_begun_or_had_ended() -> None:
    clean = attack(1000, [0.3], victims=3)
    early = replace(clean.victims[0], chunks=clean.victims[0].chunks[:20])
    found = verdicts.not_all_decoded([clean, Attack(clean.prompt, (early, *clean.victims[1:]))])
    assert found is not None
    assert "in 1 of 2 repeats" in found.sentence
    assert "2 of 3" in found.sentence
    ended = verdicts.ended_before_the_prompt([Attack(clean.prompt, (early, *clean.victims[1:]))])
    assert ended is not None
    assert "2 of 3 were left" in ended.sentence
    assert verdicts.not_all_decoded([clean]) is None
    assert verdicts.ended_before_the_prompt([clean]) is None


def test_streams_that_stall_without_a_prompt() -> None:
    """One quiet gap in 15 is 80 ms, the others 10."""
    stamps, now = [], 0.0
    for step in range(150):
        now += 0.08 if step % 15 == 7 else 0.01
        stamps.append(now)
    prompt = record("p", now + 1e-3, [now + 0.1], 1000)
    noisy = Attack(prompt, (record("s", 0.0, [*stamps, now + 0.1, now + 0.2], 32),))
    found = verdicts.noisy_quiet([noisy])
    assert found is not None
    assert "quiet p99 80.0 ms, median 10.0 ms" in found.sentence
    assert verdicts.noisy_quiet([attack(1000, [0.3], victims=4)]) is None


def test_repeats_that_differ_and_too_few() -> None:
    found = verdicts.repeats_differ([attack(1000, [worst]) for worst in (0.3, 0.5)])
    assert found is not None
    assert "between 300 and 500 ms" in found.sentence
    assert verdicts.repeats_differ([attack(1000, [worst]) for worst in (0.3, 0.4)]) is None
    few = verdicts.too_few([attack(1000, [0.3], victims=4)] * 2)
    assert few is not None
    assert few.sentence.startswith("2 arrivals")
    assert verdicts.too_few([attack(1000, [0.3], victims=4)] * 3) is None


@pytest.mark.parametrize(
    ("change", "name"),
    [({"cached_tokens": 512}, "prefix-cache"), ({"prompt_tokens": 900}, "prompt-length")],
)
def test_the_prompt_is_held_to_what_was_asked(change: dict[str, int], name: str) -> None:
    clean = attack(1000, [0.3], victims=4)
    spoiled = Attack(replace(clean.prompt, **change), clean.victims)
    assert names(verdicts.stall_verdicts(4, None, FACTS, [], [spoiled] * 3, [])) == {name}


def test_a_whole_result() -> None:
    """Three repeats of 1,000 tokens in passes of 50, 60 and 70 ms: 150 ms of stall a stream."""
    attacks = [attack(1000, [0.05, 0.06, 0.07], victims=4) for _ in range(3)]
    records = StallRecords(alone=[attacks[0].prompt], attacks=attacks)
    found = analyse_stall(Asked("A", 8, 1000), FACTS, records, slots=5, notes=["shortened"])
    assert (found.victims, found.asked_victims, found.prompt_tokens, found.attacks) == (4, 8, 1000, 3)
    assert found.quiet_gap_ms is not None
    assert found.quiet_gap_ms.median == pytest.approx(10)
    assert found.prefill_gap_ms is not None
    assert found.prefill_gap_ms.worst == pytest.approx(70)
    assert found.worst_over_quiet == pytest.approx(7)
    assert found.stalled_s_per_stream is not None
    assert found.stalled_s_per_stream.median == pytest.approx(0.150)
    assert found.stalled_s_per_stream.n == 12
    assert found.ttft_ms is not None
    assert found.ttft_ms.median == pytest.approx(180 - 1 + 0.2)
    assert found.chunking is not None
    assert (found.chunking.least, found.chunking.most) == (334, 499)
    assert found.timeline is not None
    assert len(found.timeline.streams) == 4
    assert found.timeline.prefill_s == pytest.approx(0.1792)
    assert found.notes == ("shortened",)
    assert names(list(found.verdicts)) == {"few-slots"}


def test_a_run_that_measured_nothing() -> None:
    found = analyse_stall(Asked("A", 8, 1000, 50.0), replace(FACTS, error="it died"), StallRecords())
    assert (found.attacks, found.quiet_gap_ms, found.chunking, found.advice) == (0, None, None, None)
    assert found.verdicts == ()
    assert found.error == "it died"
