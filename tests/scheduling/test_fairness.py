"""Random traffic with priorities, shared prefixes, budgets, aborts and preemption: what must hold in every step."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from biphase.scheduling.budget import LEAST_CHUNK
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.plan import StepPlan, StepResult
from biphase.scheduling.request import Request
from biphase.scheduling.scheduler import Scheduler
from biphase.scheduling.step_time import StepShape, StepTimeLaw
from tests.scheduling.test_scheduler import EchoExecutor, expected

BLOCK = 16
LIMIT = 100


def seconds_of(shape: StepShape) -> float:
    """20 ms to read the weights, half a millisecond a token."""
    return 0.02 + 5e-4 * (shape.decodes + shape.chunk) + 1e-7 * shape.decode_context + 5e-8 * shape.pairs


FIRST = [
    *(StepShape().with_chunk(n, past) for n, past in ((16, 0), (64, 0), (90, 0), (40, 50))),
    *(StepShape(n, n * context) for n, context in ((1, 16), (1, 90), (4, 40), (4, 90))),
]


@dataclass
class Arrival:
    """A request of the traffic; ``family`` names the text that its prompt begins with."""

    step: int
    family: int
    prompt: int
    output: int
    priority: int
    aborted: int | None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    family=st.integers(0, 3),
    prompt=st.integers(1, 60),
    output=st.integers(1, 40),
    priority=st.integers(-1, 1),
    aborted=st.none() | st.integers(0, 80),
)
configs = st.builds(
    SchedulerConfig,
    num_blocks=st.integers(7, 30),
    max_model_len=st.just(LIMIT),
    block_size=st.just(BLOCK),
    max_num_batched_tokens=st.integers(4, 80),
    max_num_seqs=st.integers(1, 4),
    itl_budget_ms=st.none() | st.floats(5, 60),
    prefix_caching=st.booleans(),
)


@dataclass
class Traffic:
    """Runs arrivals through a scheduler and looks at every step."""

    scheduler: Scheduler
    coming: list[tuple[Arrival, Request]]
    executor: EchoExecutor = field(default_factory=lambda: EchoExecutor(BLOCK))
    admitted: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        step = 0
        while self.scheduler.has_work or any(arrival.step >= step for arrival, _ in self.coming):
            for arrival, request in self.coming:
                if arrival.step == step:
                    self.scheduler.add(request)
                if arrival.aborted == step:
                    self.scheduler.abort(request.id)
            if self.scheduler.has_work:
                self.one_step()
            step += 1
            assert step < 20_000, "no end"

    def one_step(self) -> None:
        scheduler, law = self.scheduler, self.scheduler.law
        running = list(scheduler.running)
        decoding = {request.id for request in running if request.decodes}
        lengths = {request.id: len(request.output) for _, request in self.coming}
        limit, noise = scheduler.config.itl_budget_ms, law.noise
        plan = scheduler.plan(0.0)
        assert plan.slices, "work waits and nothing runs"
        self.check_phases(plan, running, decoding)
        self.check_order(plan, running)
        if limit is not None and plan.decode and sum(s.count for s in plan.prefill) > LEAST_CHUNK:
            assert law.predict(plan.shape) <= limit / 1000 / (1 + min(noise, 1)) + 1e-12
        result = self.executor.run(plan)
        scheduler.commit(plan, StepResult(result.tokens, {}, seconds_of(plan.shape)), 0.0)
        scheduler.check()
        self.check_resumption(plan, lengths)

    def check_phases(self, plan: StepPlan, running: list[Request], decoding: set[str]) -> None:
        """Every decode runs or is preempted, and so does a prefill beside them: neither side starves the other."""
        scheduled = [s.request.id for s in plan.slices]
        assert len(set(scheduled)) == len(scheduled)
        assert not set(scheduled) & set(plan.preempted), "a victim has a slice"
        assert decoding <= {*scheduled, *plan.preempted}
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        prefilling = [r for r in running if r.id not in decoding and r.id not in plan.preempted]
        if prefilling:
            assert prefilling[0].id in scheduled, "the first prefill stands still"
        for request in self.scheduler.running:  # nobody holds some of its blocks and waits for the rest
            assert len(request.blocks) * BLOCK >= request.num_tokens

    def check_order(self, plan: StepPlan, running: list[Request]) -> None:
        """Whoever is admitted comes before all who go on waiting, by priority and then by arrival."""
        place = {request.id: (request.priority, n) for n, (_, request) in enumerate(self.coming)}
        admitted = [s.request.id for s in plan.slices if s.request not in running]
        waiting = [request.id for request in self.scheduler.waiting]
        if admitted and waiting:
            assert max(place[name] for name in admitted) < min(place[name] for name in waiting)
        self.admitted |= dict.fromkeys(admitted, 0)

    def check_resumption(self, plan: StepPlan, lengths: dict[str, int]) -> None:
        """Whoever is admitted is not put back in the very next step, before it has got a token."""
        for name in plan.preempted:
            assert self.admitted.get(name) != 1
        self.admitted = {
            name: steps + 1
            for name, steps in self.admitted.items()
            if name not in plan.preempted and lengths[name] == len(self.request(name).output)
        }

    def request(self, name: str) -> Request:
        return next(request for _, request in self.coming if request.id == name)


@settings(max_examples=150)
@given(st.lists(arrivals, min_size=1, max_size=12), configs)
def test_what_must_hold_in_every_step(rows: list[Arrival], config: SchedulerConfig) -> None:
    rows.sort(key=lambda arrival: arrival.step)
    coming = [
        (row, Request(f"r{n}", tuple([row.family] * row.prompt), row.output, priority=row.priority))
        for n, row in enumerate(rows)
    ]
    law = StepTimeLaw([(shape, seconds_of(shape)) for shape in FIRST])
    scheduler = Scheduler(config, law)
    Traffic(scheduler, coming).run()
    assert scheduler.pool.num_free == config.num_blocks
    for row, request in coming:
        want = expected(request.prompt, request.max_tokens, frozenset())
        assert request.output == want or (row.aborted is not None and request.output == want[: len(request.output)])


def test_a_held_request_keeps_its_place_and_lets_the_others_by() -> None:
    scheduler, executor = Scheduler(SchedulerConfig(20, LIMIT, max_num_seqs=1)), EchoExecutor(BLOCK)
    held, later = Request("held", (1, 2, 3), 2, held=True), Request("later", (1, 2, 3), 2)
    scheduler.add(held)
    assert not scheduler.has_work
    scheduler.add(later)
    plan = scheduler.plan(0.0)
    assert [s.request.id for s in plan.slices] == ["later"]
    scheduler.commit(plan, executor.run(plan), 0.0)
    held.held = False
    scheduler.add(Request("last", (1, 2, 3), 2))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, executor.run(plan), 0.0)
    assert [s.request.id for s in scheduler.plan(0.0).slices] == ["held"]
    assert scheduler.abort("held")
    scheduler.check()
