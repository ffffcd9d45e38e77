"""The search for the highest load that keeps an SLO, on servers that are functions."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from biphase.analysis.goodput import Window, measured
from biphase.analysis.saturation import MOST_PROBES, Probe, Search, backlog, judge
from biphase.analysis.slo import Slo
from tests.analysis.load_records import record

PROBE = Probe(
    level=1.0,
    asked_per_s=1.0,
    sent_per_s=1.0,
    due=100,
    attained=1.0,
    low=0.9,
    high=1.0,
    goodput_per_s=1.0,
    ttft_p95_ms=1.0,
    itl_p99_ms=1.0,
    in_flight=5.0,
    holds=True,
    client_limited=False,
    why="",
)


def run(search: Search, holds: Callable[[float], bool], **probe: object) -> Search:
    while (level := search.next) is not None:
        search.add(replace(PROBE, level=level, holds=holds(level), **probe))
    return search


@given(st.floats(0.02, 500), st.floats(0.5, 20), st.sampled_from([0.01, 0.05, 0.1, 0.5]), st.sampled_from([1, 3]))
def test_a_sharp_knee_is_bracketed_to_the_precision(knee: float, start: float, precision: float, repeats: int) -> None:
    found = run(Search(start, precision, repeats), lambda level: level <= knee).result()
    if found.highest is None:
        assert knee < start / 32
        return
    if found.lowest_failing is None:
        assert len(found.probes) == MOST_PROBES or knee > start * 500
        return
    assert found.highest <= knee < found.lowest_failing
    if len(found.probes) < MOST_PROBES:
        assert found.lowest_failing <= found.highest * (1 + precision)


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_the_majority_decides_against_noise(seed: int) -> None:
    """Each run says the wrong thing with 10 %, or the truth: of three runs the majority is wrong with 2.8 %."""
    rng = random.Random(seed)
    found = run(Search(1.0, 0.1, 3), lambda level: (level <= 8.5) ^ (rng.random() < 0.1)).result()
    votes: dict[float, list[bool]] = {}
    for probe in found.probes:
        votes.setdefault(probe.level, []).append(probe.holds)
    for level, heard in votes.items():
        assert len(heard) <= 3
        assert sum(heard) == 2 or len(heard) - sum(heard) == 2 or len(found.probes) == MOST_PROBES
        assert found.highest != level or sum(heard) == 2


def test_no_level_that_holds_ends_the_search() -> None:
    found = run(Search(64.0), lambda level: False).result()
    assert found.highest is None
    assert found.probes[-1].level == 1.0
    assert "even 1 did not keep the SLO" in found.ended


def test_requests_that_do_not_meet_need_no_lower_rate() -> None:
    found = run(Search(64.0), lambda level: False, in_flight=0.1).result()
    assert found.highest is None
    assert {probe.level for probe in found.probes} == {64.0}
    assert "hardly meet each other" in found.ended


def test_a_level_that_never_fails_ends_the_search() -> None:
    found = run(Search(1.0, repeats=1), lambda level: True).result()
    assert found.highest == 1024.0
    assert found.lowest_failing is None
    assert "no level failed" in found.ended


def test_a_client_that_cannot_send_ends_the_search_and_blames_no_server() -> None:
    search = Search(10.0, repeats=1)
    search.add(replace(PROBE, level=10.0))
    search.add(replace(PROBE, level=20.0, holds=False, client_limited=True, asked_per_s=20.0, sent_per_s=12.0))
    found = search.result()
    assert search.next is None
    assert (found.highest, found.lowest_failing) == (10.0, None)
    assert "--workers" in found.ended


def test_what_is_known_when_the_search_is_broken_off() -> None:
    search = Search(10.0, repeats=1)
    search.add(replace(PROBE, level=10.0))
    assert search.result("interrupted").ended == "interrupted"
    assert search.result("interrupted").highest == 10.0


WINDOW = Window(0.0, 10.0)


def test_a_run_holds_when_the_share_keeps_the_slo() -> None:
    """19 of 20 keep 150 ms."""
    records = [record(str(i), 0.5 * i, first=0.1 if i else 0.2) for i in range(20)]
    slo = Slo(ttft_ms=150)
    found = judge(2.0, measured(records, WINDOW, True, slo, 0.0), slo)
    assert found.holds
    assert (found.level, found.due, found.attained) == (2.0, 20, pytest.approx(0.95))
    strict = Slo(ttft_ms=150, share=0.96)
    missed = judge(2.0, measured(records, WINDOW, True, strict, 0.0), strict)
    assert not missed.holds
    assert missed.why == "ttft kept by 95 %"


def test_an_slo_that_bounds_no_waiting_needs_a_queue_that_does_not_grow() -> None:
    """Ten requests a second, one of them done a second: gaps stay short while the queue grows without end."""
    records = [record(str(i), 0.1 * i, first=0.9 * i + 0.5, gap=0.01) for i in range(100)]
    slo = Slo(itl_ms=20)
    found = measured(records, WINDOW, True, slo, 0.0)
    assert backlog(found)
    probe = judge(10.0, found, slo)
    assert probe.attained == 1.0
    assert not probe.holds
    assert "the queue grows" in probe.why


def test_a_steady_server_has_no_backlog() -> None:
    records = [record(str(i), 0.1 * i, first=0.5) for i in range(-20, 120)]
    assert not backlog(measured(records, WINDOW, True, None, -2.0))


def test_a_client_that_sends_less_than_asked_says_nothing() -> None:
    records = [record(str(i), 0.1 * i, late=0.15 * i, first=0.01) for i in range(100)]
    slo = Slo(itl_ms=20)
    probe = judge(10.0, measured(records, WINDOW, True, slo, 0.0), slo)
    assert probe.client_limited
    assert not probe.holds
    assert "says nothing of the server" in probe.why
