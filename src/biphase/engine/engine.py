"""One model with its scheduler: requests in, tokens out, a step at a time. Knows no text and no HTTP."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import cycle
from time import perf_counter
from typing import Any, Literal

from biphase.engine.grammar import GrammarError, Grammars
from biphase.engine.messages import Output, Step, Submit, Vocabulary
from biphase.engine.rows import TwoPhaseModel
from biphase.engine.runner import Runner
from biphase.engine.trace import Trace
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.plan import StepPlan, StepResult
from biphase.scheduling.request import FinishReason, Request
from biphase.scheduling.scheduler import Outcome, QueueFullError, Scheduler
from biphase.scheduling.step_time import StepShape, StepTimeLaw

RefusalCode = Literal["queue_full", "rejected"]


class Engine:
    """The three-line loop over a ``Scheduler`` and a ``Runner``."""

    def __init__(self, model: TwoPhaseModel, config: SchedulerConfig, trace: Trace | None = None) -> None:
        self.scheduler = Scheduler(config)
        self.runner = Runner(model)
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._trace = trace
        self._preparing: dict[str, tuple[Request, Future[Any]]] = {}
        self._unread: Vocabulary | None = None
        self._rested = False

    @property
    def has_work(self) -> bool:
        """Whether a step can run something."""
        return self.scheduler.has_work

    @property
    def preparing(self) -> bool:
        """Whether a grammar is being compiled, for ``take_prepared`` to look after."""
        return bool(self._preparing)

    def submit(self, message: Submit) -> Step | None:
        """Queue a request; a step that tells its client why, when it cannot run."""
        return self.submit_all((message,))

    def submit_all(self, messages: Sequence[Submit]) -> Step | None:
        """Queue requests, all or none; a step that tells the client of each why, when they cannot run."""
        now, names = perf_counter(), [m.id for m in messages]
        requests = [Request(m.id, m.prompt, m.max_tokens, m.stop_ids, m.sampling, now, m.priority) for m in messages]
        try:
            self.scheduler.add(*requests)
        except QueueFullError as full:
            return self._refuse(names, str(full), "queue_full", full.retry_after)
        except ValueError as error:
            return self._refuse(names, str(error), "rejected")
        for request in requests:
            self._prepare(request)
        return None

    def take_prepared(self) -> list[Step]:
        """Let requests run whose grammar is compiled; a refusal for each whose grammar cannot be used."""
        ready = [name for name, (_, compiling) in self._preparing.items() if compiling.done()]
        return [step for name in ready if (step := self._release(*self._preparing.pop(name))) is not None]

    def learn(self, vocabulary: Vocabulary) -> None:
        """Be able to hold requests to a grammar over these tokens; they are read when there is time, or need."""
        self._unread = vocabulary

    @property
    def has_chores(self) -> bool:
        """Whether a vocabulary waits to be read, or memory that later steps will use to be touched."""
        return self._unread is not None or not self._rested

    def read_vocabulary(self) -> None:
        """Make what grammars need of the vocabulary: 0.3 s for 50,000 tokens."""
        if self._unread is not None:
            self.runner.grammars = Grammars(self._unread, self.runner.model.config.vocab_size)
            self._unread = None

    def touch_ahead(self) -> bool:
        """Ask the system for a little memory that later steps will use; False when nothing is left to do."""
        self._rested = not self.runner.model.touch_ahead()
        return not self._rested

    def abort(self, request_id: str) -> None:
        """Forget a request in whatever state it is; one that is not here is left alone."""
        if request_id in self._preparing:
            self._preparing.pop(request_id)[1].cancel()
        if self.scheduler.abort(request_id) and not self.scheduler.has_work:
            self.scheduler.check()

    def close(self) -> None:
        """Start nothing more in the background."""
        if self.runner.grammars is not None:
            self.runner.grammars.close()

    def step(self) -> Step:
        """Run one step and report it."""
        now, self._rested = perf_counter(), False
        plan = self.scheduler.plan(now)
        result = self.runner.run(plan)
        outcomes = self.scheduler.commit(plan, result, perf_counter())
        if not self.scheduler.has_work:
            self.scheduler.check()
        return self._report(plan, [_output(outcome, result) for outcome in outcomes], now)

    def measure(
        self, groups: Sequence[Sequence[tuple[int, int]]], tokens_per_step: int | None = None
    ) -> list[tuple[StepShape, float]]:
        """Time the steps of groups of requests, one group after the other.

        A request is (prompt tokens, output tokens); those of a group arrive together. ``tokens_per_step`` takes the
        place of the configured limit, to see chunks. The engine must be idle; what is cached and counted of them is
        forgotten.
        """
        seen: list[tuple[StepShape, float]] = []
        first_tokens = cycle(range(self.runner.model.config.vocab_size))  # no prompt begins like another: no cache hit
        config = self.scheduler.config
        limit = min(tokens_per_step or config.max_num_batched_tokens, config.max_num_batched_tokens)
        scheduler, self.scheduler = self.scheduler, Scheduler(replace(config, max_num_batched_tokens=limit))
        try:
            for group in groups:
                for n, (prompt, output) in enumerate(group):
                    self.scheduler.add(Request(str(n), (next(first_tokens),) * prompt, output))
                while self.scheduler.has_work:
                    plan = self.scheduler.plan(0.0)
                    result = self.runner.run(plan)
                    self.scheduler.commit(plan, result, 0.0)
                    seen.append((plan.shape, result.seconds or 0.0))
        finally:
            self.scheduler = scheduler
        return seen

    def start_from(self, law: StepTimeLaw) -> None:
        """Predict steps by this law, and learn on from there."""
        self.scheduler.law = law

    def _prepare(self, request: Request) -> None:
        rules = request.sampling.rules
        if rules is None or rules.grammar is None:
            return
        self.read_vocabulary()
        if self.runner.grammars is not None:
            request.held = True
            self._preparing[request.id] = request, self.runner.grammars.compile(rules.grammar)

    def _release(self, request: Request, compiling: "Future[Any]") -> Step | None:
        assert self.runner.grammars is not None
        try:
            self.runner.grammars.adopt(request.id, compiling.result())
        except GrammarError as error:
            self.scheduler.abort(request.id)
            return self._refuse([request.id], str(error), "rejected")
        request.held = False
        return None

    def _refuse(self, names: Sequence[str], reason: str, code: RefusalCode, retry_after: float | None = None) -> Step:
        """A step that ran nothing and tells why these requests do not run."""
        refused = [
            Output(name, (), FinishReason.ERROR, reason, error_code=code, retry_after=retry_after) for name in names
        ]
        return self._report(StepPlan(), refused, perf_counter())

    def _report(self, plan: StepPlan, outputs: list[Output], began: float) -> Step:
        seconds = perf_counter() - began
        if plan.slices:
            prefill, decode = self.scheduler.law.share(plan.shape, seconds)
            self.prefill_seconds += prefill
            self.decode_seconds += decode
            if self._trace is not None:
                self._trace.step(plan, began, seconds)
        counters, decodes = self.scheduler.counters, len(plan.decode)
        return Step(
            outputs=tuple(outputs),
            seconds=seconds,
            prefill_tokens=plan.num_tokens - decodes,
            decode_tokens=decodes,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=self.scheduler.kv_usage,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            preemptions=counters.preemptions,
            cache_queries=counters.cache_queries,
            cache_hits=counters.cache_hits,
        )


def _output(outcome: Outcome, result: StepResult) -> Output:
    request = outcome.request
    logprobs = result.logprobs.get(request.id)
    first = len(request.output) == 1 and request.first_run is not None
    return Output(
        request.id,
        () if outcome.token is None else (outcome.token,),
        outcome.finish_reason,
        outcome.error,
        () if logprobs is None else (logprobs,),
        cached_tokens=request.num_cached if first else None,
        queue_seconds=request.first_run - request.arrival if first and request.first_run is not None else None,
    )
