"""Arrival processes by their moments, stamps from files, and what an open loop does when due."""

import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path

import pytest

from biphase.client.arrivals import Process, arrivals, read_arrivals
from biphase.client.load import OpenLoop
from biphase.client.openai import Call
from biphase.client.record import Record
from biphase.errors import BadInput
from tests.timing import holds_when_undisturbed


def gaps(process: Process, burstiness: float = 1.0, n: int = 20000) -> list[float]:
    moments = list(itertools.islice(arrivals(50.0, process, burstiness, random.Random(7)), n))
    assert moments[0] == 0
    return [b - a for a, b in itertools.pairwise(moments)]


@pytest.mark.parametrize(
    ("process", "burstiness", "variation"),
    [("constant", 1.0, 0.0), ("poisson", 3.0, 1.0), ("gamma", 4.0, 0.5), ("gamma", 0.25, 2.0)],
)
def test_rate_and_coefficient_of_variation(process: Process, burstiness: float, variation: float) -> None:
    """A gamma distribution of shape k varies by 1 / sqrt(k); Poisson intervals by 1; 20,000 settle it to 5 %."""
    found = gaps(process, burstiness)
    assert statistics.fmean(found) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.06, abs=1e-6)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, 0)])
def test_a_rate_that_is_none(rate: float, burstiness: float) -> None:
    with pytest.raises(BadInput, match="expected a number more than 0"):
        arrivals(rate, "gamma", burstiness)


def test_stamps_of_a_file_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "stamps.txt"
    path.write_text("1700000000.5\n1700000000.75\n1700000002\n")
    assert read_arrivals(path) == [0.0, 0.25, 1.5]


@pytest.mark.parametrize(("text", "why"), [("1\nx\n", "time stamp 2"), ("2\n1\n", "time stamp 2"), ("", "no time")])
def test_a_file_that_holds_no_stamps(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "stamps.txt"
    path.write_text(text)
    with pytest.raises(BadInput, match=why):
        read_arrivals(path)


def call(number: int) -> Call:
    return Call(str(number), "http://h", b"", 1, 1, "text")


async def answer_slowly(call: Call, due: float) -> Record:
    sent = time.perf_counter()
    await asyncio.sleep(0.05)
    return Record(id=call.id, intended=due, sent=sent)


def test_calls_go_out_when_due_whatever_is_in_flight() -> None:
    """Ten calls 5 ms apart, answered in 50 ms each: sent at 200 a second, all in flight together."""

    async def main() -> tuple[list[Record], OpenLoop]:
        loop = OpenLoop(answer_slowly, 5.0)
        return [r async for r in loop.run((0.005 * n, call(n)) for n in range(10))], loop

    def check() -> None:
        records, loop = asyncio.run(main())
        assert [r.id for r in records] == [str(n) for n in range(10)]
        assert [r.intended - records[0].intended for r in records] == pytest.approx([0.005 * n for n in range(10)])
        done = loop.achieved
        assert (done.sent, done.unfinished) == (10, 0)
        assert done.asked_per_s == pytest.approx(200)
        assert done.achieved_per_s == pytest.approx(200, rel=0.1)
        assert 0 <= done.lag_median_s <= done.lag_max_s < 0.01

    holds_when_undisturbed(check)


def test_a_hard_end_cuts_what_still_runs() -> None:
    async def main() -> tuple[list[Record], OpenLoop, float]:
        loop, began = OpenLoop(answer_slowly, 0.1), time.perf_counter()
        records = [r async for r in loop.run((0.02 * n, call(n)) for n in range(1000))]
        return records, loop, time.perf_counter() - began

    records, loop, seconds = asyncio.run(main())
    assert 0.1 <= seconds < 1.0
    assert len(records) + loop.achieved.unfinished == loop.achieved.sent <= 6
    assert loop.achieved.unfinished >= 1


def test_a_failure_of_the_sender_reaches_the_listener() -> None:
    async def fail(call: Call, due: float) -> Record:
        raise ValueError(call.id)

    async def main() -> None:
        async for _ in OpenLoop(fail, 1.0).run([(0.0, call(7))]):
            pass

    with pytest.raises(ValueError, match="7"):
        asyncio.run(main())
