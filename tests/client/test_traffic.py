"""From a workload and a load to requests: when they are due, what is cut to fit, what prompts share across runs."""

import random
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.client.openai import Dialect
from biphase.client.prompts import PromptMaker
from biphase.client.traffic import CallMaker, Fitter, Load, check_size, due, endless
from biphase.client.workload_file import Item
from biphase.client.workloads import Workload
from biphase.errors import BadInput

PAIR = Workload("pair", "two requests", (Item(100, 10), Item(200, 20)))
TIMED = Workload("timed", "three", (Item(10, 1, 5.0), Item(20, 1, 6.0), Item(30, 1, 9.0)))
OPEN = Fitter(None, 1, clip=True)


def moments(load: Load, seconds: float, workload: Workload = PAIR, most: int | None = None) -> list[tuple[float, int]]:
    found = due(workload, load, seconds, Fitter(None, 1, True), most, random.Random(3))
    return [(at, numbered.item.input_tokens) for at, numbered in found]


def test_constant_arrivals_take_the_requests_in_turn() -> None:
    assert moments(Load("constant", 4.0), 1.0) == [(0.0, 100), (0.25, 200), (0.5, 100), (0.75, 200)]


def test_a_trace_keeps_its_gaps_divided_by_the_speed() -> None:
    assert moments(Load("trace", 1.0), 60, TIMED) == [(0.0, 10), (1.0, 20), (4.0, 30)]
    assert moments(Load("trace", 2.0), 60, TIMED) == [(0.0, 10), (0.5, 20), (2.0, 30)]


def test_a_trace_ends_with_the_duration_and_is_not_begun_anew() -> None:
    assert moments(Load("trace", 1.0), 4.0, TIMED) == [(0.0, 10), (1.0, 20)]
    assert len(moments(Load("trace", 1.0), 1e6, TIMED)) == 3


def test_requests_are_limited_in_number() -> None:
    assert len(moments(Load("constant", 100.0), 60, most=7)) == 7
    assert len(moments(Load("trace", 1.0), 60, TIMED, most=2)) == 2


def test_poisson_arrivals_have_their_rate() -> None:
    """1,000 expected, standard deviation 32: within five of them."""
    assert 840 < len(moments(Load("poisson", 100.0), 10.0)) < 1160


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 4000), st.integers(1, 40), st.booleans())
def test_what_is_sent_fits(inputs: int, outputs: int, limit: int, shortest: int, clip: bool) -> None:
    fitter = Fitter(limit, shortest, clip)
    item = fitter.fit(Item(inputs, outputs))
    fitted = fitter.fitted
    if item is None:
        assert fitted.dropped == 1
        return
    assert item.input_tokens + item.output_tokens <= limit
    assert item.input_tokens >= shortest
    assert item.output_tokens >= 1
    changed = (item.input_tokens, item.output_tokens) != (max(inputs, shortest), outputs)
    assert fitted.clipped == changed
    assert fitted.lengthened == (inputs < shortest)
    assert clip or not changed


def test_clipping_keeps_the_answer_up_to_half_the_context() -> None:
    fitter = Fitter(1000, 1, clip=True)
    assert fitter.fit(Item(5000, 100)) == Item(900, 100)
    assert fitter.fit(Item(500, 8000)) == Item(500, 500)
    assert fitter.fit(Item(10, 8000)) == Item(10, 500)
    assert fitter.fitted.clipped == 3


def test_nothing_that_fits_is_one_line() -> None:
    with pytest.raises(BadInput, match="no request of pair fits into the server's limit of 50 tokens"):
        next(endless(PAIR, Fitter(50, 1, clip=False)))


def test_requests_start_over_with_the_next_lap() -> None:
    found = list(islice(endless(PAIR, OPEN), 5))
    assert [(n.lap, n.number, n.item.input_tokens) for n in found] == [
        (0, 0, 100),
        (0, 1, 200),
        (1, 2, 100),
        (1, 3, 200),
        (2, 4, 100),
    ]


def test_prompts_share_blocks_within_a_lap_of_a_run_and_nowhere_else() -> None:
    workload = Workload("w", "", (Item(40, 1, None, (1, 2)), Item(40, 1, None, (1, 3))), block_tokens=16)
    prompts = PromptMaker(range(1000, 9000))

    def sent(run: str, count: int) -> list[list[int]]:
        make = CallMaker(Dialect("http://h/v1", "m"), prompts, workload, run)
        return [msgspec.json.decode(make.make(n).body)["prompt"] for n in islice(endless(workload, OPEN), count)]

    first, second, third, _ = sent("a", 4)
    assert first[:16] == second[:16]
    assert first[16:32] != second[16:32]
    assert first[:16] != third[:16]  # the next lap
    assert sent("b", 1)[0][:16] != first[:16]  # another run
    assert sent("a", 1)[0][:16] == first[:16]


def test_a_load_that_cannot_be_prepared_is_refused() -> None:
    check_size(PAIR, Load("constant", 1000.0), 60.0, None)
    check_size(PAIR, Load("constant", 1e9), 60.0, 100)
    check_size(PAIR, Load("closed", 1e5), 1e9, None)
    with pytest.raises(BadInput, match="lower the rate, --duration or --requests"):
        check_size(PAIR, Load("constant", 1e6), 60.0, None)
