"""What the loop of a measurement puts off, what it says of its own lag meanwhile, and the collector's pace in it."""

import asyncio
import gc
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from biphase.client import clock


@contextmanager
def watched() -> Iterator[tuple[clock.LagSelector, socket.socket]]:
    """A selector that waits for one socket, and the socket that writes to it."""
    reader, writer = socket.socketpair()
    selector = clock.LagSelector()
    with reader, writer:
        selector.register(reader, selectors.EVENT_READ)
        yield selector, writer
        selector.close()


def test_work_is_put_off_while_something_arrives() -> None:
    with watched() as (selector, writer):
        done: list[int] = []
        selector.put_off(time.perf_counter(), lambda: done.append(1))
        selector.put_off(time.perf_counter(), lambda: done.append(2))
        writer.send(b"x")
        assert len(selector.select(0)) == 1
        assert done == []


def test_work_is_done_in_order_when_nothing_arrives_and_ends_the_wait() -> None:
    with watched() as (selector, _):
        done: list[int] = []
        selector.put_off(time.perf_counter(), lambda: done.append(1))
        selector.put_off(time.perf_counter(), lambda: done.append(2))
        began = time.perf_counter()
        while len(done) < 2:
            assert selector.select(60) == []  # what the work made ready must get its turn
        assert done == [1, 2]
        assert time.perf_counter() - began < 30


def test_old_work_is_done_though_something_always_arrives() -> None:
    with watched() as (selector, writer):
        done: list[int] = []
        selector.put_off(time.perf_counter() - 2 * clock.LONGEST_PUT_OFF_S, lambda: done.append(1))
        writer.send(b"x")
        assert len(selector.select(0)) == 1
        assert done == [1]


def test_one_look_does_no_more_than_a_slice() -> None:
    """Each piece takes longer than the slice, so that no look does two."""
    with watched() as (selector, _):
        done: list[int] = []

        def work() -> None:
            time.sleep(2 * clock.SLICE_S)
            done.append(1)

        for _ in range(3):
            selector.put_off(time.perf_counter(), work)
        selector.select(0)
        assert done == [1]


def test_what_arrives_during_the_work_is_known_to_have_waited() -> None:
    with watched() as (selector, writer):
        moments: list[float] = []

        def work() -> None:
            moments.append(time.perf_counter())
            writer.send(b"x")
            time.sleep(0.01)

        selector.put_off(time.perf_counter(), work)
        while not selector.select(0):
            pass
        assert selector.earliest <= moments[0]


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_as_before_after_a_run(fails: bool) -> None:
    before = gc.get_threshold()

    async def main() -> int:
        if fails:
            raise ValueError("in the run")
        return gc.get_threshold()[0]

    if fails:
        with pytest.raises(ValueError, match="in the run"):
            clock.run(main())
    else:
        assert clock.run(main()) > 10 * before[0]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("by_the_host", [False, True])
def test_what_the_host_froze_stays_frozen_and_nothing_else(by_the_host: bool) -> None:
    async def main() -> int:
        return gc.get_freeze_count()

    gc.unfreeze()
    try:
        if by_the_host:
            gc.freeze()
        assert clock.run(main()) > 0
        assert (gc.get_freeze_count() > 0) == by_the_host
    finally:
        gc.freeze()  # as tests/conftest.py left it


def test_other_loops_put_nothing_off() -> None:
    async def main() -> list[int]:
        done: list[int] = []
        clock.arrival_clock().put_off(time.perf_counter(), lambda: done.append(1))
        return done

    assert asyncio.run(main()) == [1]
