"""The prefix cache: what is found, what is forgotten first, and that sharing conserves blocks."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from biphase.scheduling.blocks import BlockPool, Piece, next_piece
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.request import Request
from biphase.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import EchoExecutor, expected


def serve(scheduler: Scheduler, request: Request) -> list[int]:
    """Run one request to its end; the starts of its slices."""
    executor, starts = EchoExecutor(scheduler.config.block_size), []
    scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        starts += [s.start for s in plan.slices]
        scheduler.commit(plan, executor.run(plan), 0.0)
        scheduler.check()
    return starts


@pytest.mark.parametrize(
    ("length", "again", "hit"),
    [(48, 48, 32), (49, 49, 48), (40, 40, 32), (16, 16, 0), (17, 17, 16), (33, 64, 32), (64, 33, 32)],
)
def test_a_prompt_again_starts_behind_its_full_blocks_but_computes_its_last_token(
    length: int, again: int, hit: int
) -> None:
    scheduler = Scheduler(SchedulerConfig(40, 200))
    serve(scheduler, Request("first", tuple(range(length)), 1))
    second = Request("second", tuple(range(again)), 3)
    assert serve(scheduler, second)[0] == hit
    assert second.num_cached == hit
    assert (scheduler.counters.cache_queries, scheduler.counters.cache_hits) == (length + again, hit)
    assert second.output == expected(second.prompt, 3, frozenset())


def test_output_is_cached_too() -> None:
    scheduler = Scheduler(SchedulerConfig(40, 200))
    first = Request("first", tuple(range(10)), 30)
    serve(scheduler, first)
    turn = Request("turn", (*first.prompt, *first.output, 7, 7), 2)
    assert serve(scheduler, turn)[0] == 32  # the KV of 39 tokens was computed, two full blocks of it are 32


def test_switched_off_nothing_is_found() -> None:
    scheduler = Scheduler(SchedulerConfig(40, 200, prefix_caching=False))
    for name in ("a", "b"):
        assert serve(scheduler, Request(name, tuple(range(64)), 1))[0] == 0


def test_a_difference_in_the_first_token_shares_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(40, 200))
    serve(scheduler, Request("a", tuple(range(64)), 1))
    assert serve(scheduler, Request("b", (99, *range(1, 64)), 1))[0] == 0


def test_two_at_once_share_blocks_and_give_them_back_once() -> None:
    scheduler = Scheduler(SchedulerConfig(40, 200))
    serve(scheduler, Request("warm", tuple(range(64)), 1))
    a, b = Request("a", tuple(range(64)), 20), Request("b", (*range(48), 5, 5, 5), 20)
    executor = EchoExecutor(16)
    for request in (a, b):
        scheduler.add(request)
    plan = scheduler.plan(0.0)
    assert a.blocks[:3] == b.blocks[:3]
    while scheduler.has_work:
        scheduler.commit(plan, executor.run(plan), 0.0)
        scheduler.check()
        plan = scheduler.plan(0.0)
    assert scheduler.pool.num_free == 40
    for request in (a, b):
        assert request.output == expected(request.prompt, 20, frozenset())


def test_the_tail_is_forgotten_before_the_head_and_the_old_before_the_new() -> None:
    pool = BlockPool(4)
    pieces: list[Piece] = []
    for n in range(4):
        pieces.append(next_piece(pieces[-1] if pieces else None, [n] * 4))
    blocks = pool.allocate(4)
    for block, piece in zip(blocks, pieces, strict=True):
        pool.publish(block, piece)
    pool.free(blocks)
    assert pool.match(pieces) == blocks
    taken = pool.allocate(2)
    assert pool.match(pieces) == blocks[:2]
    assert set(taken) == set(blocks[2:])


def test_a_colliding_digest_is_no_hit() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    honest = next_piece(None, [1, 2, 3])
    pool.publish(block, honest)
    forged = Piece(honest.digest, honest.parent, (9, 9, 9))
    assert pool.match([forged]) == []
    assert pool.match([honest]) == [block]


def test_digests_depend_on_everything_before() -> None:
    first, other = next_piece(None, [1, 2]), next_piece(None, [3, 4])
    same_tokens = {next_piece(before, [5, 6]).digest for before in (None, first, other)}
    assert len(same_tokens) == 3


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=14),
    st.integers(8, 24),
    st.integers(4, 64),
)
def test_shared_prefixes_under_pressure_give_the_same_tokens(
    rows: list[tuple[int, int, int]], num_blocks: int, budget: int
) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks, 100, 16, budget, 4))
    requests = [Request(f"r{n}", tuple([family] * size), out) for n, (family, size, out) in enumerate(rows)]
    executor = EchoExecutor(16)
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan.slices
        scheduler.commit(plan, executor.run(plan), 0.0)
        scheduler.check()
    assert scheduler.pool.num_free == num_blocks
    for request in requests:
        assert request.output == expected(request.prompt, request.max_tokens, frozenset())
