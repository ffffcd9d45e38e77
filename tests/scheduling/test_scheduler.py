"""The scheduler under random traffic: budgets kept, blocks conserved, every request ends with the same tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from biphase.scheduling.blocks import BlockPool
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.plan import StepPlan, StepResult
from biphase.scheduling.request import FinishReason, Request
from biphase.scheduling.scheduler import Scheduler


class EchoExecutor:
    """The next token is a function of all tokens before it, so that a wrong slice or a lost token shows."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.computed: dict[str, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for name in (*plan.freed, *plan.preempted):
            self.computed.pop(name, None)
        tokens = {}
        for s in plan.slices:
            # behind a cached prefix at the start and after a preemption, else where the last slice ended
            assert s.start == self.computed.get(s.request.id, s.start)
            assert s.start == 0 or s.request.id in self.computed or s.start % self.block_size == 0
            assert len(s.request.blocks) * self.block_size >= s.start + s.count, "every computed token has a place"
            self.computed[s.request.id] = s.start + s.count
            if s.samples:
                tokens[s.request.id] = next_token(s.request.tokens(0, s.request.num_tokens))
        return StepResult(tokens)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 1000


def expected(prompt: tuple[int, ...], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def run_to_end(scheduler: Scheduler, arrivals: list[tuple[int, Request]], aborts: dict[int, str]) -> list[StepPlan]:
    executor, plans, step = EchoExecutor(scheduler.config.block_size), [], 0
    while scheduler.has_work or arrivals:
        while arrivals and arrivals[0][0] <= step:
            scheduler.add(arrivals.pop(0)[1])
        if step in aborts:
            scheduler.abort(aborts[step])
        if scheduler.has_work:
            plan = scheduler.plan(float(step))
            assert plan.slices, "work waits and nothing runs"
            scheduler.commit(plan, executor.run(plan), float(step))
            scheduler.check()
            plans.append(plan)
        step += 1
        assert step < 20_000, "no end"
    return plans


traffic = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(1, 60), st.integers(1, 40), st.frozensets(st.integers(0, 999), max_size=30)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(traffic, st.integers(7, 30), st.integers(1, 4), st.integers(4, 64), st.data())
def test_every_request_ends_with_its_tokens(
    rows: list[tuple[int, int, int, frozenset[int]]], num_blocks: int, max_seqs: int, budget: int, data: st.DataObject
) -> None:
    config = SchedulerConfig(
        num_blocks, max_model_len=100, block_size=16, max_num_batched_tokens=budget, max_num_seqs=max_seqs
    )
    scheduler = Scheduler(config)
    requests = [
        (when, Request(f"r{n}", tuple(range(n, n + size)), out, stops))
        for n, (when, size, out, stops) in enumerate(rows)
    ]
    requests.sort(key=lambda pair: pair[0])
    aborted = set(data.draw(st.lists(st.sampled_from([r.id for _, r in requests]), max_size=3), label="aborted"))
    aborts = {data.draw(st.integers(0, 60)): name for name in aborted}
    plans = run_to_end(scheduler, list(requests), dict(aborts))
    assert scheduler.pool.num_free == num_blocks
    for plan in plans:
        assert plan.num_tokens <= budget
        assert len(plan.slices) <= max_seqs
        kinds = [s.is_decode for s in plan.slices]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
    for _, request in requests:
        want = expected(request.prompt, request.max_tokens, request.stop_ids)
        assert request.output == want or (
            request.id in aborts.values() and request.output == want[: len(request.output)]
        )


@settings(max_examples=60, deadline=None)
@given(traffic, st.integers(4, 64))
def test_first_come_first_served(rows: list[tuple[int, int, int, frozenset[int]]], budget: int) -> None:
    scheduler = Scheduler(SchedulerConfig(20, 100, 16, budget, 4))
    requests = [(0, Request(f"r{n}", tuple(range(size)), out)) for n, (_, size, out, _) in enumerate(rows)]
    plans = run_to_end(scheduler, list(requests), {})
    firsts = [s.request.id for plan in plans for s in plan.slices]
    first_seen = list(dict.fromkeys(firsts))
    assert first_seen == [request.id for _, request in requests]


def test_decodes_go_on_while_a_long_prompt_is_chunked() -> None:
    scheduler = Scheduler(SchedulerConfig(200, 2000, 16, max_num_batched_tokens=64, max_num_seqs=8))
    executor = EchoExecutor(16)
    scheduler.add(Request("victim", (1, 2, 3), 50))
    first = scheduler.plan(0.0)
    scheduler.commit(first, executor.run(first), 0.0)
    scheduler.add(Request("long", tuple(range(1000)), 2))
    for _ in range(16):
        plan = scheduler.plan(0.0)
        assert [s.request.id for s in plan.slices] == ["victim", "long"]
        assert plan.slices[0].count == 1
        assert plan.num_tokens <= 64
        scheduler.commit(plan, executor.run(plan), 0.0)


def test_the_youngest_is_preempted_and_resumes_with_the_same_tokens() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=6, max_model_len=96, block_size=16, max_num_seqs=4))
    old, young = Request("old", tuple(range(30)), 60), Request("young", tuple(range(30)), 40)
    plans = run_to_end(scheduler, [(0, old), (0, young)], {})
    assert scheduler.counters.preemptions > 0
    assert {name for plan in plans for name in plan.preempted} == {"young"}
    assert old.output == expected(old.prompt, 60, frozenset())
    assert young.output == expected(young.prompt, 40, frozenset())


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=2, max_model_len=1000, block_size=16))
    with pytest.raises(ValueError, match="30 prompt tokens and 3 output tokens exceed the limit of 32"):
        scheduler.add(Request("r", tuple(range(30)), 3))
    with pytest.raises(ValueError, match="at least one prompt token"):
        scheduler.add(Request("r", (), 3))
    assert not scheduler.has_work


def test_a_failed_row_ends_that_request_alone() -> None:
    scheduler = Scheduler(SchedulerConfig(20, 100))
    good, bad = Request("good", (1, 2), 3), Request("bad", (3, 4), 3)
    scheduler.add(good)
    scheduler.add(bad)
    plan = scheduler.plan(0.0)
    outcomes = scheduler.commit(plan, StepResult({"good": 7}, {"bad": "NaN"}), 0.0)
    assert [(o.request.id, o.finish_reason, o.error) for o in outcomes] == [
        ("good", None, None),
        ("bad", FinishReason.ERROR, "NaN"),
    ]
    assert scheduler.running == [good]
    scheduler.check()


def test_abort_works_in_every_state_and_twice() -> None:
    scheduler = Scheduler(SchedulerConfig(20, 100, max_num_seqs=1))
    for name in ("running", "waiting"):
        scheduler.add(Request(name, (1, 2, 3), 5))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, EchoExecutor(16).run(plan), 0.0)
    assert scheduler.abort("waiting")
    assert scheduler.abort("running")
    assert not scheduler.abort("running")
    assert not scheduler.has_work
    assert scheduler.pool.num_free == 20
    assert set(scheduler.plan(0.0).freed) == {"waiting", "running"}


@pytest.mark.parametrize(
    "field", ["num_blocks", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs"]
)
def test_limits_must_be_positive(field: str) -> None:
    values = {"num_blocks": 4, "max_model_len": 64, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        SchedulerConfig(**values)


def test_more_sequences_than_tokens_in_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs 8 exceeds max_num_batched_tokens 4"):
        SchedulerConfig(4, 64, max_num_batched_tokens=4, max_num_seqs=8)


def test_the_pool_sees_a_leak_and_a_double_use() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(AssertionError, match="not the blocks that the pool gave out"):
        pool.check([blocks[:1]])
    with pytest.raises(AssertionError, match="not the blocks that the pool gave out"):
        pool.check([blocks, blocks[:1]])
    with pytest.raises(ValueError, match="3 blocks asked for and 2 free"):
        pool.allocate(3)
    pool.free(blocks)
    with pytest.raises(KeyError):
        pool.free(blocks)


def test_tokens_of_a_request_cross_from_prompt_to_output() -> None:
    request = Request("r", (10, 11, 12), 5, output=[20, 21])
    assert [request.tokens(start, 2) for start in range(4)] == [[10, 11], [11, 12], [12, 20], [20, 21]]
    assert request.tokens(0, 5) == [10, 11, 12, 20, 21]
