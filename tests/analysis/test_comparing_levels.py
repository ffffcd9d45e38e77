"""Two benches compared: intervals by tables and by brute force, what is pooled, and what is not compared."""

import math
import random
from typing import Any

import msgspec
import pytest

from biphase.analysis.comparing import Profile, compare
from biphase.analysis.comparing_levels import Bench, Level, level_differences, levels_worse, newcombe, poisson_ratio
from biphase.client.traffic import Load
from biphase.errors import BadInput

SLO = {"ttft_ms": 500.0, "itl_ms": None, "tpot_ms": None, "e2e_ms": None, "share": 0.95}
TRAFFIC = {"requests": 1, "mean_input_tokens": 512.0, "mean_output_tokens": 512.0, "shares_prefixes": False}


def level(
    good: int | None,
    due: int = 200,
    rate: float = 4.0,
    completed: float = 4.0,
    seconds: float = 50.0,
    kind: str = "poisson",
    answered: int | None = None,
) -> Any:
    return {
        "load": {"kind": kind, "level": rate, "burstiness": 1.0},
        "description": "ignored",
        "measured": {
            "window_s": seconds,
            "outcomes": {"due": due, "completed": due if answered is None else answered},
            "flow": {"completed": completed, "sent": 4.0},
            "attainment": None if good is None else {"good": good, "all": good / due},
        },
    }


def bench(*levels: Any, slo: Any = SLO, shown: int = 0, saturation: Any = None, **traffic: Any) -> Bench:
    content = {"workload": TRAFFIC | traffic, "slo": slo, "levels": levels, "shown": shown, "saturation": saturation}
    return msgspec.convert(content, Bench)


def by_name(first: Bench, second: Bench) -> dict[str, Any]:
    return {d.name: d for d in level_differences(first, second)[0]}


def test_the_difference_of_shares_is_newcombe_s() -> None:
    """56 of 70 less 48 of 80 is from 0.0524 to 0.3339: Newcombe 1998, table II, method 10."""
    low, high = newcombe((56, 70), (48, 80))
    assert low == pytest.approx(-0.3339, abs=1e-4)
    assert high == pytest.approx(-0.0524, abs=1e-4)


def test_the_ratio_of_counts_by_hand() -> None:
    """With nothing in the first, the share of the second has the lower end 0.025^(1/n): odds of it."""
    share = 0.025 ** (1 / 5)
    assert poisson_ratio((0, 10.0), (5, 20.0)) == (pytest.approx(share / (1 - share) / 2), math.inf)
    assert poisson_ratio((5, 10.0), (0, 10.0))[0] == 0.0


def test_the_interval_of_a_ratio_holds_what_it_says() -> None:
    """By brute force: of 400 pairs of Poisson counts about 95 % of the intervals hold the true ratio, at least 92 %."""
    rng = random.Random(1)

    def poisson(mean: float) -> int:
        count, left = -1, mean
        while left > 0:
            left -= rng.expovariate(1.0)
            count += 1
        return count

    held = 0
    for _ in range(400):
        low, high = poisson_ratio((poisson(30.0), 10.0), (poisson(45.0), 10.0))
        held += low <= 1.5 <= high
    assert held >= 0.92 * 400


def test_fewer_good_requests_are_worse_and_chance_is_no_difference() -> None:
    clear = by_name(bench(level(195)), bench(level(120)))
    assert clear["goodput"].first == pytest.approx(3.9)  # of 4 a second
    assert clear["goodput"].second == pytest.approx(2.4)
    assert clear["goodput"].change == pytest.approx(120 / 195)
    assert clear["goodput"].outcome == "worse"
    assert clear["attained"].change == pytest.approx((120 - 195) / 200)
    assert clear["attained"].outcome == "worse"
    assert clear["completed"].outcome == "no difference"
    chance = by_name(bench(level(195)), bench(level(191)))
    assert {d.outcome for d in chance.values()} == {"no difference"}
    better = by_name(bench(level(120)), bench(level(195)))
    assert (better["goodput"].outcome, better["attained"].outcome) == ("better", "better")


def test_in_an_open_loop_it_is_chance_how_many_came() -> None:
    """100 and 200 in 50 s, all good but one in ten: 90 % of the 3 a second that came in both."""
    found = by_name(bench(level(90, 100)), bench(level(180, 200)))
    assert (found["goodput"].first, found["goodput"].second) == pytest.approx((2.7, 2.7))
    assert (found["goodput"].change, found["goodput"].outcome) == (1.0, "no difference")
    low, high = newcombe((90, 100), (180, 200))
    assert (found["goodput"].low, found["goodput"].high) == pytest.approx((1 + low / 0.9, 1 + high / 0.9))
    none = by_name(bench(level(0)), bench(level(180)))["goodput"]
    assert (none.first, none.change, none.low, none.high) == (0.0, math.inf, math.inf, math.inf)
    assert none.outcome == "better"


def test_in_a_closed_loop_rates_are_compared() -> None:
    found = by_name(bench(level(190, kind="closed")), bench(level(95, 100, completed=2.0, kind="closed")))
    assert (found["goodput"].first, found["goodput"].second, found["goodput"].change) == (3.8, 1.9, 0.5)
    assert (found["goodput"].low, found["goodput"].high) == poisson_ratio((190, 50.0), (95, 50.0))
    assert found["attained"].outcome == "no difference"
    assert (found["completed"].change, found["completed"].points, found["completed"].outcome) == (0.5, False, "worse")


def test_without_an_slo_completed_requests_are_compared_alone() -> None:
    found = by_name(bench(level(None), slo=None), bench(level(None, answered=100), slo=None))
    assert list(found) == ["completed"]
    assert (found["completed"].change, found["completed"].points) == (-0.5, True)
    assert found["completed"].outcome == "worse"


def test_runs_of_one_level_are_pooled_and_levels_of_one_alone_are_named() -> None:
    first = bench(level(20, 40), level(30, 40), level(1, rate=8.0))
    second = bench(level(25, 40), level(2, rate=16.0))
    found, notes = level_differences(first, second)
    goodput = next(d for d in found if d.name == "goodput")
    assert (goodput.first, goodput.second) == pytest.approx((50 / 80 * 120 / 150, 25 / 40 * 120 / 150))
    assert {d.load for d in found} == {"Poisson arrivals at 4 requests/s"}
    assert notes == ["of one alone: Poisson arrivals at 8 requests/s; Poisson arrivals at 16 requests/s"]


def test_goodput_under_two_slos_is_not_compared() -> None:
    found, notes = level_differences(bench(level(195)), bench(level(120), slo=SLO | {"ttft_ms": 100.0}))
    assert [d.name for d in found] == ["completed"]
    assert notes == ["the SLOs differ: goodput and attainment are not compared"]


@pytest.mark.parametrize(
    ("second", "change", "low", "high", "outcome"),
    [
        ({"highest": 8.0, "lowest_failing": 8.8}, 1.0, 8 / 8.8, 1.1, "no difference"),
        ({"highest": 4.0, "lowest_failing": 4.4}, 0.5, 4 / 8.8, 0.55, "worse"),
        ({"highest": 16.0, "lowest_failing": None}, 2.0, 16 / 8.8, math.inf, "better"),
        ({"highest": None, "lowest_failing": 1.0}, 0.0, 0.0, 1 / 8, "worse"),
    ],
)
def test_searches_are_compared_by_their_brackets(
    second: Any, change: float, low: float, high: float, outcome: str
) -> None:
    a = bench(level(195), saturation={"highest": 8.0, "lowest_failing": 8.8})
    found = by_name(a, bench(level(195), saturation=second))["saturation"]
    assert (found.change, found.low, found.high, found.outcome) == pytest.approx((change, low, high, outcome))
    assert found.unit == "req/s"


def test_only_what_is_beyond_the_limit_fails() -> None:
    found, _ = level_differences(bench(level(195)), bench(level(150)))
    assert {d.name for d in levels_worse(found, 0.05)} == {"goodput", "attained"}
    assert {d.name for d in levels_worse(found, 0.225)} == {"goodput"}  # x 0.77, and 22.5 points
    assert levels_worse(found, 0.25) == []


def profile(found: Bench | None) -> Profile:
    return Profile("m", "u", 32, (), bench=found)


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(BadInput, match="one is of biphase profile and the other of biphase bench"):
        compare(profile(bench(level(1))), profile(None))
    with pytest.raises(
        BadInput, match=r"different workloads \(1 requests of 512 tokens in and 512 out; 1 requests of 99 "
    ):
        compare(profile(bench(level(1))), profile(bench(level(1), mean_input_tokens=99.0)))
    with pytest.raises(BadInput, match="no level of load in common"):
        compare(profile(bench(level(1))), profile(bench(level(1, rate=9.0))))


def test_nothing_at_all_is_no_number() -> None:
    for kind in ("poisson", "closed"):
        none = bench(level(0, completed=0.0, kind=kind, answered=0))
        found = by_name(none, none)
        assert {d.outcome for d in found.values()} == {"no difference"}
        assert (found["goodput"].low, found["goodput"].high) == (0.0, math.inf)
    assert level_differences(bench(level(None, 0), slo=None), bench(level(None), slo=None))[0] == []


@pytest.mark.parametrize("wrong", [{"good": 201}, {"good": 10**30}, {"good": 1, "answered": 201}, {"good": -1}])
def test_counts_that_cannot_be_are_no_bench(wrong: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError):
        bench(level(**wrong))
    for seconds in (0.0, -1.0, 1e-300):
        with pytest.raises(msgspec.ValidationError):
            bench(level(1, seconds=seconds))


def test_loads_that_differ_in_shape_are_two_levels() -> None:
    bursty = level(100)
    bursty["load"] |= {"kind": "gamma", "burstiness": 0.5}
    assert level_differences(bench(level(100)), bench(bursty))[0] == []
    assert msgspec.convert(bursty, Level).load == Load("gamma", 4.0, 0.5)
