"""The step-time law finds constants that are known and follows a change; the ITL budget holds on its clock."""

import random

import pytest

from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.plan import StepPlan, StepResult
from biphase.scheduling.request import Request
from biphase.scheduling.scheduler import QueueFullError, Scheduler
from biphase.scheduling.step_time import StepShape, StepTimeLaw
from tests.scheduling.test_scheduler import EchoExecutor


def machine(shape: StepShape) -> float:
    """Seconds of a step on a machine with known constants: 20 ms to read the weights, half a millisecond a token."""
    work = 5e-4 * (shape.decodes + shape.chunk) + 1e-7 * shape.decode_context + 5e-8 * shape.pairs
    return 0.02 + work


FIRST = [
    *(StepShape().with_chunk(n, past) for n, past in ((16, 0), (64, 0), (256, 0), (256, 512))),
    *(StepShape(n, n * context) for n, context in ((1, 16), (1, 512), (8, 128), (8, 512))),
    StepShape(4, 2000).with_chunk(128, 256),
]


class TimedExecutor(EchoExecutor):
    """An executor whose seconds follow ``machine``, ``slowness`` times as long, with noise of 3 %."""

    def __init__(self) -> None:
        super().__init__(16)
        self.slowness = 1.0
        self.random = random.Random(0)

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        return StepResult(result.tokens, {}, machine(plan.shape) * self.slowness * self.random.gauss(1, 0.03))


def test_the_law_predicts_a_machine_with_known_constants() -> None:
    law = StepTimeLaw([(shape, machine(shape)) for shape in FIRST])
    for shape in (*FIRST, StepShape(4, 4000).with_chunk(100, 1000), StepShape(6, 1500)):
        assert law.predict(shape) == pytest.approx(machine(shape), rel=0.08)


def test_a_law_that_starts_from_nothing_shares_a_mixed_step_after_a_few_steps() -> None:
    """Steps of a second beside decodes of 20 ms: learnt too slowly, the decodes would get a multiple of their share."""
    law, alone, mixed = StepTimeLaw(), StepShape(4, 400), StepShape(4, 400).with_chunk(2048, 0)
    for _ in range(3):
        law.learn(alone, machine(alone))
        law.learn(mixed, machine(mixed))
    prefill, decode = law.share(mixed, machine(mixed))
    assert decode == pytest.approx(machine(alone), rel=0.05)
    assert prefill == pytest.approx(machine(mixed) - machine(alone), rel=0.01)


def test_the_shape_of_a_plan_counts_pairs_as_by_hand() -> None:
    shape = StepShape(2, 30).with_chunk(3, 5)
    assert (shape.chunk, shape.pairs) == (3, (5 + 1) + (5 + 2) + (5 + 3))


def test_the_largest_chunk_is_the_largest() -> None:
    law = StepTimeLaw([(shape, machine(shape)) for shape in FIRST])
    decode = StepShape(4, 4000)
    found = law.largest_chunk(decode, 700, 2048, 0.08)
    assert law.predict(decode.with_chunk(found, 700)) <= 0.08 < law.predict(decode.with_chunk(found + 1, 700))
    assert law.largest_chunk(decode, 0, 10, 5.0) == 10
    assert law.largest_chunk(decode, 0, 2048, 0.001) == 0


def gaps_of_a_victim(budget_ms: float | None, slow_from: int | None = None) -> tuple[list[float], int]:
    """Step seconds while four streams decode and a prompt of 4,000 tokens is prefilled, and how many steps it took."""
    config = SchedulerConfig(600, 8000, max_num_batched_tokens=8192, itl_budget_ms=budget_ms)
    scheduler = Scheduler(config, StepTimeLaw([(shape, machine(shape)) for shape in FIRST]))
    executor = TimedExecutor()
    for n in range(4):
        scheduler.add(Request(f"victim{n}", tuple(range(n, n + 50)), 3000))
    for _ in range(30):
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, executor.run(plan), 0.0)
    long = Request("long", tuple(range(5000, 9000)), 1)
    scheduler.add(long)
    seconds = []
    while not long.output:
        if len(seconds) == slow_from:
            executor.slowness = 2.0
        plan = scheduler.plan(0.0)
        result = executor.run(plan)
        assert {s.request.id for s in plan.decode} == {f"victim{n}" for n in range(4)}
        assert result.seconds is not None
        seconds.append(result.seconds)
        scheduler.commit(plan, result, 0.0)
    return seconds, len(seconds)


def test_without_a_budget_the_long_prompt_stalls_every_stream() -> None:
    seconds, steps = gaps_of_a_victim(None)
    assert steps == 1
    assert seconds[0] > 2.0  # 4,000 tokens at half a millisecond each


def test_with_a_budget_every_step_keeps_within_it() -> None:
    seconds, steps = gaps_of_a_victim(80.0)
    assert max(seconds) < 0.080 * 1.10  # noise of 3 % and an error of the law
    # the 58 ms beside the decodes hold about 100 tokens, so about 45 steps of 80 ms
    assert 35 < steps < 60


def test_the_budget_is_found_again_when_the_machine_slows_down() -> None:
    seconds, _ = gaps_of_a_victim(100.0, slow_from=5)
    assert max(seconds[5:8]) > 0.120
    assert max(seconds[20:]) < 0.100 * 1.15


def test_prefill_is_not_starved_by_decodes_that_fill_the_budget() -> None:
    seconds, steps = gaps_of_a_victim(10.0)  # a decode step alone takes 22 ms
    assert steps == 250  # 16 tokens a step
    assert max(seconds) < 0.060


def test_whole_prompts_without_chunked_prefill() -> None:
    scheduler = Scheduler(SchedulerConfig(600, 8000, max_num_batched_tokens=64, chunked_prefill=False))
    scheduler.add(Request("long", tuple(range(4000)), 2))
    scheduler.add(Request("next", (1, 2, 3), 2))
    plan = scheduler.plan(0.0)
    assert [(s.request.id, s.count) for s in plan.slices] == [("long", 4000)]


def test_a_lower_priority_number_goes_first_and_is_preempted_last() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=6, max_model_len=96, max_num_seqs=2))
    executor, order = EchoExecutor(16), []
    for name, priority in (("batch", 5), ("late", 0), ("later", 0)):
        scheduler.add(Request(name, tuple(range(30)), 40, priority=priority))
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        order += [s.request.id for s in plan.slices if s.request.id not in order]
        assert "late" not in plan.preempted
        scheduler.commit(plan, executor.run(plan), 0.0)
        scheduler.check()
    assert order == ["late", "later", "batch"]


def test_the_queue_is_capped_in_requests_and_in_prompt_tokens() -> None:
    law = StepTimeLaw([(shape, machine(shape)) for shape in FIRST])
    scheduler = Scheduler(SchedulerConfig(40, 600, max_queued_requests=2, max_queued_tokens=100), law)
    scheduler.add(Request("a", tuple(range(90)), 1))
    with pytest.raises(
        QueueFullError, match="90 prompt tokens wait, and 11 more would exceed the 100 that may"
    ) as full:
        scheduler.add(Request("b", tuple(range(11)), 1))
    assert full.value.retry_after == pytest.approx(machine(StepShape().with_chunk(90, 0)), rel=0.1)
    scheduler.add(Request("c", tuple(range(10)), 1))
    with pytest.raises(QueueFullError, match="2 requests wait, and 1 more would exceed the 2 that may"):
        scheduler.add(Request("d", (1,), 1))
    scheduler.plan(0.0)
    scheduler.add(Request("alone", tuple(range(500)), 1))  # longer than the cap, but nothing waits


def test_requests_that_come_together_are_taken_or_refused_together() -> None:
    """More than may wait are taken where nothing waits: a client told to come again would be told so for ever."""
    scheduler = Scheduler(SchedulerConfig(40, 600, max_num_seqs=2, max_queued_requests=3, max_queued_tokens=10))
    scheduler.add(*(Request(f"first {n}", (1, 2, 3), 1) for n in range(8)))
    assert len(scheduler.waiting) == 8
    scheduler = Scheduler(SchedulerConfig(40, 600, max_queued_requests=3, max_queued_tokens=10))
    scheduler.add(Request("waits", (1,), 1))
    with pytest.raises(QueueFullError, match="1 requests wait, and 3 more"):
        scheduler.add(*(Request(f"second {n}", (1,), 1) for n in range(3)))
    with pytest.raises(QueueFullError, match="1 prompt tokens wait, and 10 more"):
        scheduler.add(*(Request(f"third {n}", (1,) * 5, 1) for n in range(2)))
    with pytest.raises(ValueError, match="exceed the limit"):
        scheduler.add(Request("fits", (1,), 1), Request("never fits", (1,), 10_000))
    assert [request.id for request in scheduler.waiting] == ["waits"]
    scheduler.add(*(Request(f"fourth {n}", (1,), 1) for n in range(2)))
    assert len(scheduler.waiting) == 3


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"itl_budget_ms": 0}, "itl_budget_ms must be above 0, not 0"),
        ({"max_queued_requests": -1}, "max_queued_requests must be above 0, not -1"),
        ({"itl_budget_ms": 50, "chunked_prefill": False}, "itl_budget_ms needs chunked prefill"),
    ],
)
def test_limits_that_cannot_be(change: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        SchedulerConfig(4, 64, **change)
