"""Bench against servers whose answer to a load is worked out by hand: slots, service times, queues, prefix caches."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from biphase.analysis.bench_result import BenchResult, LevelResult
from biphase.analysis.slo import Slo
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.client.record import Record, RunFacts
from biphase.client.traffic import Load
from biphase.client.workload_file import Item
from biphase.client.workloads import Workload
from biphase.errors import BadInput, RunFailed
from biphase.experiments.bench import BenchPlan, measure
from biphase.experiments.load_run import Timing
from tests.law_server import law_server
from tests.slot_server import slot_server
from tests.timing import holds_when_undisturbed

SIX = Workload("six", "answers of six tokens", (Item(8, 6),))


def bench(url: str, workload: Workload = SIX, **plan: Any) -> tuple[BenchResult, list[Record]]:
    records: list[Record] = []

    def keep(line: Record | RunFacts) -> None:
        if isinstance(line, Record):
            records.append(line)

    plan = {"timing": Timing(2.0, 10.0), "warmup_s": 0.0, **plan}
    asked = BenchPlan(workload, **plan)
    result = clock.run(measure(url, None, Access(), asked, keep, lambda *_: None, "test"))
    return result, records


def only(result: BenchResult) -> LevelResult:
    (level,) = result.bench.levels
    return level


def test_goodput_of_one_slot_under_twice_its_load() -> None:
    """Service 25 + 5 x 5 = 50 ms, arrivals every 25 ms: the n-th waits 25 n ms, then 25 ms for its first token.

    Of 40 requests those with 25 + 25 n <= 268 keep a limit of 268 ms, n = 0 ... 9: ten, however many follow.
    """

    def check() -> None:
        with slot_server(first_s=0.025, gap_s=0.005) as url:
            result, _ = bench(url, loads=(Load("constant", 40.0),), slo=Slo(ttft_ms=268), timing=Timing(1.0, 10.0))
        found = only(result).measured
        assert found.outcomes.due == 40
        assert found.outcomes.completed == 40
        assert found.attainment is not None
        assert found.attainment.good == 10
        assert found.flow.goodput == pytest.approx(10.0)
        assert found.flow.completed == pytest.approx(20.0, abs=1.2)
        assert found.ttft_ms is not None
        assert found.ttft_ms.max == pytest.approx(25 + 25 * 39, rel=0.05)
        assert "not-steady" in {verdict.name for verdict in only(result).verdicts}

    holds_when_undisturbed(check)


def test_the_saturation_rate_of_one_slot_is_one_over_its_service_time() -> None:
    """20 + 5 x 4 = 40 ms of service: evenly spaced arrivals never wait up to 25 a second, and wait ever longer above.

    Of n requests at x times that rate the last tenth waits more than 0.9 n 40 (1 - 1 / x) ms. At 45 ms for the first
    token 25 ms of them are allowed: in a run of 25 requests up to x = 1.03.
    """

    def check() -> None:
        with slot_server(first_s=0.02, gap_s=0.004) as url:
            plan: dict[str, Any] = {"loads": (Load("constant", 20.0),), "timing": Timing(1.0, 10.0)}
            result, _ = bench(url, slo=Slo(ttft_ms=45, share=0.9), search=True, repeats=1, **plan)
        found = result.bench.saturation
        assert found is not None
        assert found.highest is not None
        assert found.lowest_failing is not None
        assert found.highest <= 25.8
        assert found.lowest_failing >= 24.7
        assert found.lowest_failing <= 1.1 * found.highest
        assert len(found.probes) == len(result.bench.levels)
        assert result.bench.levels[result.bench.shown].load.level == found.highest

    holds_when_undisturbed(check)


def test_an_impossible_slo_says_what_an_idle_server_does() -> None:
    """15 ms of service 15 times a second are 0.23 requests in flight."""
    with slot_server(first_s=0.01, gap_s=0.001) as url:
        plan: dict[str, Any] = {"loads": (Load("constant", 15.0),), "timing": Timing(0.5, 10.0)}
        result, _ = bench(url, slo=Slo(ttft_ms=5), search=True, repeats=1, **plan)
    found = result.bench.saturation
    assert found is not None
    assert found.highest is None
    assert "hardly meet each other" in found.ended
    assert result.profile.error is None


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    def check() -> None:
        with slot_server(first_s=0.025, gap_s=0.005) as url:
            result, records = bench(url, loads=(Load("closed", 4.0),), timing=Timing(1.2, 10.0), warmup_s=0.3)
        found = only(result).measured
        assert found.occupancy.mean == pytest.approx(4.0, abs=0.2)
        assert found.flow.asked is None
        assert found.flow.completed == pytest.approx(20.0, abs=1.4)
        assert found.before_s == pytest.approx(0.3)
        assert found.window_s == pytest.approx(0.9, abs=0.05)
        measured = [r for r in records if not r.id.startswith("prompt")]
        assert found.outcomes.due < len(measured)  # what was sent in the warm-up is in the records all the same

    holds_when_undisturbed(check)


def test_requests_turned_away_are_counted_apart_and_miss_the_slo() -> None:
    """A queue of one beside the slot: at four times its rate about three of four are turned away."""
    with slot_server(first_s=0.05, gap_s=0.01, queue=1) as url:
        result, _ = bench(url, loads=(Load("constant", 40.0),), slo=Slo(ttft_ms=2000), timing=Timing(1.0, 10.0))
    o = only(result).measured.outcomes
    assert o.due == 40
    assert o.completed + o.turned_away == 40
    assert 9 <= o.completed <= 13  # a second of ten a second, one in service and one in the queue
    assert only(result).measured.attainment is not None
    assert only(result).measured.flow.goodput == pytest.approx(o.completed)
    verdict = next(v for v in only(result).verdicts if v.name == "not-all-answered")
    assert f"{o.turned_away} turned away" in verdict.sentence
    assert result.profile.error is None


def test_a_server_that_dies_midway_leaves_what_was_measured() -> None:
    with slot_server(slots=4, first_s=0.02, dies_after=30) as url:
        result, records = bench(url, loads=(Load("constant", 40.0), Load("constant", 80.0)), timing=Timing(5.0, 10.0))
    good = sum(record.error is None for record in records)
    assert 20 <= good < 30
    assert result.profile.error is not None
    assert f"the server is gone after {good} good requests" in result.profile.error
    level = only(result)  # the second was not begun
    assert level.measured.outcomes.completed == good
    assert level.measured.outcomes.failed >= 10
    assert sum(row.requests for row in result.profile.rows) == good


def test_no_request_completed_is_said_with_the_reason() -> None:
    with slot_server(fails=True) as url:
        result, _ = bench(url, loads=(Load("constant", 40.0),), timing=Timing(0.5, 5.0))
    assert result.profile.error is not None
    assert result.profile.error.startswith("no request was completed: ")
    assert "HTTP 500" in result.profile.error
    assert only(result).measured.outcomes.failed == 20
    assert result.profile.rows == ()


def test_what_does_not_end_within_the_drain_is_unfinished() -> None:
    """Ten requests of 0.5 s in one slot, given up after 0.7 s: one ends, nine do not."""
    with slot_server(first_s=0.5, gap_s=0.0) as url:
        result, records = bench(url, loads=(Load("constant", 20.0),), timing=Timing(0.5, 0.25), slo=Slo(ttft_ms=5000))
    o = only(result).measured.outcomes
    assert (o.due, o.completed, o.unfinished) == (10, 1, 9)
    assert only(result).measured.attainment is not None
    assert only(result).measured.flow.goodput == pytest.approx(2.0)
    assert len(records) == 10


def test_prompts_beyond_the_limit_are_cut_or_left_out_with_the_count() -> None:
    mixed = Workload("mixed", "", (Item(50, 6), Item(500, 6), Item(20, 400)))
    with slot_server(slots=50, first_s=0.005, gap_s=0.001, max_model_len=100) as url:
        cut, records = bench(url, mixed, loads=(Load("constant", 60.0),), timing=Timing(0.5, 5.0))
        left, kept = bench(url, mixed, loads=(Load("constant", 60.0),), timing=Timing(0.5, 5.0), clip=False)
    assert (cut.bench.fitted.clipped, cut.bench.fitted.dropped) == (20, 0)
    assert {(r.asked_prompt_tokens, r.asked_completion_tokens) for r in records} == {(50, 6), (94, 6), (20, 50)}
    assert "20 of 30 requests were cut to the server's limit of 100 tokens" in cut.profile.verdicts[0].sentence
    assert {r.asked_prompt_tokens for r in kept} == {50}
    assert left.bench.fitted.dropped in (58, 59, 60)  # two before each of 30
    assert left.profile.verdicts[0].name == "dropped"


def test_nothing_that_fits_is_refused() -> None:
    long = Workload("long", "", (Item(500, 6),))
    with slot_server(max_model_len=100) as url, pytest.raises(BadInput, match="fits into the server's limit of 100"):
        bench(url, long, loads=(Load("constant", 10.0),), clip=False)


def test_ttft_by_uncached_length_sees_the_prefix_cache() -> None:
    """0.5 ms a token that is not cached: 512 tokens of which 448 are known cost 32 ms, and lie in the bucket of 64."""
    shared = Workload("shared", "", (Item(512, 2, None, tuple(range(7))), Item(512, 2, None, tuple(range(7)))), 64)

    def check() -> None:
        with slot_server(slots=20, first_s=0.0, gap_s=0.01, per_token_s=0.0005, block=64) as url:
            result, records = bench(url, shared, loads=(Load("constant", 4.0),), timing=Timing(2.0, 5.0))
        # the first of each lap is new, the second finds its blocks
        cached = [r.cached_tokens for r in sorted(records, key=lambda r: r.intended)]
        assert cached == [0, 448] * 4
        rows = {b.up_to: b for b in only(result).by_uncached}
        assert set(rows) == {64, 512}
        assert rows[64].ttft_ms.n == rows[512].ttft_ms.n == 4
        assert rows[64].ttft_ms.median == pytest.approx(32, rel=0.25)
        assert rows[512].ttft_ms.median == pytest.approx(256, rel=0.1)
        assert "prefix-cache" not in {v.name for v in result.profile.verdicts}

    holds_when_undisturbed(check)


def test_a_trace_is_replayed_at_its_own_times_and_twice_as_fast() -> None:
    timed = Workload("timed", "", tuple(Item(8, 2, at) for at in (0.0, 0.1, 0.15, 0.5, 0.8)))
    with slot_server(slots=9, first_s=0.005) as url:
        _, plain = bench(url, timed, loads=(Load("trace", 1.0),), timing=Timing(10.0, 5.0))
        _, fast = bench(url, timed, loads=(Load("trace", 2.0),), timing=Timing(10.0, 5.0))
    for records, speed in ((plain, 1.0), (fast, 2.0)):
        due = sorted(record.intended for record in records)
        gaps = [b - a for a, b in pairwise(due)]
        assert gaps == pytest.approx([0.1 / speed, 0.05 / speed, 0.35 / speed, 0.3 / speed], abs=1e-6)
        assert all(record.sent >= record.intended for record in records)


def test_engine_seconds_of_the_server_price_the_tokens() -> None:
    """20 ms + 0.2 ms x 100 tokens of prefill and 10 ms for each further token: 40 ms for 100 in, 50 ms for 6 out."""
    with slot_server(slots=4, first_s=0.02, gap_s=0.01, per_token_s=0.0002, engine_seconds=True) as url:
        hundred = Workload("hundred", "", (Item(100, 6),))
        result, _ = bench(url, hundred, loads=(Load("constant", 20.0),), per_hour=3.6, timing=Timing(1.0, 10.0))
    found = only(result).price
    assert found is not None
    assert found.phase_time.source == "measured"
    assert found.phase_time.prefill_s == pytest.approx(20 * 0.04)
    assert found.phase_time.decode_s == pytest.approx(20 * 0.05)
    assert found.output_to_input == pytest.approx((0.05 / 6) / (0.04 / 100))
    assert found.input_at_full_use == pytest.approx(0.001 * 0.04 / 100 * 1e6)


def test_without_engine_seconds_the_laws_are_measured_first_and_the_price_is_marked_as_modelled() -> None:
    """Prefill 6 + 0.06 S ms, a step 3 + 0.3 B ms: 100 tokens in cost 12 ms, a token alone 3.3 ms."""

    def check() -> None:
        with law_server(a=6.0, b=0.06, c=0.0, t0=3.0, w=0.3, k=0.0) as url:
            hundred = Workload("hundred", "", (Item(100, 8),))
            result, _ = bench(url, hundred, loads=(Load("constant", 6.0),), per_hour=3.6, timing=Timing(1.0, 5.0))
        found = only(result).price
        assert found is not None
        assert found.phase_time.source == "modelled"
        assert "laws fitted to prompts up to 100 tokens" in found.phase_time.how
        assert found.phase_time.prefill_s == pytest.approx(6 * 0.012, rel=0.25)
        assert found.phase_time.decode_s == pytest.approx(6 * 7 * 0.0033, rel=0.25)
        assert result.profile.prefill_law is not None

    holds_when_undisturbed(check)


def test_client_processes_send_as_this_one_does() -> None:
    with slot_server(slots=4, first_s=0.02, gap_s=0.01) as url:
        result, records = bench(url, loads=(Load("constant", 30.0),), workers=2, timing=Timing(1.0, 10.0))
    assert only(result).measured.outcomes.completed == 30
    assert result.bench.workers == 2
    assert {record.error for record in records} == {None}


def test_the_json_holds_a_profile_and_vllm_s_keys() -> None:
    from biphase.report.bench_files import bench_json

    with slot_server(slots=4, first_s=0.02, gap_s=0.01) as url:
        result, _ = bench(url, loads=(Load("constant", 30.0),), slo=Slo(ttft_ms=1000), timing=Timing(1.0, 10.0))
    content = msgspec.json.decode(bench_json(result))
    from biphase.analysis.profile_result import ProfileResult

    assert set(content) >= set(ProfileResult.__struct_fields__) - {"vllm_bench"}
    assert [row["prompt_tokens"] for row in content["rows"]] == [8]
    assert content["num_prompts"] == content["completed"] == 30
    assert content["request_goodput"] == pytest.approx(30.0)
    assert content["request_rate"] == pytest.approx(30.0)
    assert content["mean_ttft_ms"] > 19
    assert content["bench"]["slo"]["ttft_ms"] == 1000
    assert msgspec.convert(content["bench"], type(result.bench)) == result.bench


def test_a_window_without_a_request_is_one_line() -> None:
    with slot_server() as url, pytest.raises(RunFailed, match="no request was due after the warm-up"):
        bench(url, loads=(Load("constant", 1.0),), timing=Timing(1.0, 5.0), warmup_s=0.5)
