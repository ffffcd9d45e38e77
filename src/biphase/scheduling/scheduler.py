"""Which tokens run in the next step: decodes always, chunks of prefill in what the budget leaves.

First come, first served within a priority. A waiting request is admitted only when the KV of all its known tokens
fits, so that no two half-admitted requests can wait for each other (vLLM #45388). When a decode finds no free block,
the last of the running requests is preempted: its blocks go back and it recomputes later (``num_computed = 0``),
which costs little where the prefix cache still has them.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from biphase.scheduling.blocks import BlockPool, Piece, next_piece
from biphase.scheduling.budget import PrefillBudget
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.plan import Slice, StepPlan, StepResult
from biphase.scheduling.request import FinishReason, Request
from biphase.scheduling.step_time import StepShape, StepTimeLaw


class QueueFullError(Exception):
    """The queue has reached a cap; ``retry_after`` is a guess in seconds at when it has room, None before any step."""

    def __init__(self, message: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought one request: a token, its end, or both."""

    request: Request
    token: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Counters:
    """Totals since the start. ``cache_queries`` and ``cache_hits`` are prompt tokens, counted once at admission."""

    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0


class Scheduler:
    """State of all requests. ``plan`` decides a step, ``commit`` books its result; the caller runs it in between."""

    def __init__(self, config: SchedulerConfig, law: StepTimeLaw | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.law = law or StepTimeLaw()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.counters = Counters()
        self._order: dict[str, tuple[int, int]] = {}
        self._arrivals = 0
        self._freed: list[str] = []
        self._preempted: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether a step can run something."""
        return bool(self.running) or self._head() is not None

    @property
    def kv_usage(self) -> float:
        """Share of the pool that requests hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(len(request.prompt) for request in self.waiting)

    def add(self, *requests: Request) -> None:
        """Queue requests, all or none.

        ``ValueError``: one can never fit (vLLM #39734). ``QueueFullError``: there is no room now. Where nothing waits
        there is, however many they are: else they would be told for ever to come again.
        """
        for request in requests:
            self._check_size(request)
        self._check_caps(requests)
        for request in requests:
            self._order[request.id] = (request.priority, self._arrivals)
            self._arrivals += 1
            insort(self.waiting, request, key=self._rank)

    def _check_size(self, request: Request) -> None:
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if total > self.config.max_request_tokens:
            raise ValueError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens exceed the limit of "
                f"{self.config.max_request_tokens}"
            )

    def abort(self, request_id: str) -> bool:
        """Forget a request in whatever state it is; False when it is not here (any more)."""
        for request in [*self.running, *self.waiting]:
            if request.id == request_id:
                self._release(request)
                return True
        return False

    def plan(self, now: float) -> StepPlan:
        """The next step at ``now`` (seconds, the caller's clock). Empty only without work."""
        slices = list(self._plan_decodes())
        decode = StepShape(len(slices), sum(s.start + 1 for s in slices))
        slices += self._plan_prefills(PrefillBudget(self.config, self.law, decode), now)
        slices.sort(key=lambda s: not s.is_decode)  # a resumed request may go on with a decode behind chunks of others
        plan = StepPlan(tuple(slices), tuple(self._freed), tuple(self._preempted))
        self._freed, self._preempted = [], []
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Outcome]:
        """Book a step: tokens count as computed, sampled tokens are appended, ended requests are released."""
        if result.seconds is not None:
            self.law.learn(plan.shape, result.seconds)
        outcomes = []
        for piece in plan.slices:
            request = piece.request
            if request.id in result.failed:
                self._release(request)
                outcomes.append(Outcome(request, None, FinishReason.ERROR, result.failed[request.id]))
                continue
            request.num_computed += piece.count
            self._publish(request, piece.start)
            if piece.samples:
                outcomes.append(self._append(request, result.tokens[request.id]))
        return outcomes

    def check(self) -> None:
        """Integrity of the pool; run when idle and after every test."""
        self.pool.check(request.blocks for request in self.running)
        if any(request.blocks or request.num_computed for request in self.waiting):
            raise AssertionError("a waiting request holds blocks or counts computed tokens")
        if self._order.keys() != {request.id for request in [*self.running, *self.waiting]}:
            raise AssertionError("the ranks kept are not those of the live requests")

    def _head(self) -> Request | None:
        """The first that waits and may run."""
        return next((request for request in self.waiting if not request.held), None)

    def _rank(self, request: Request) -> tuple[int, int]:
        return self._order[request.id]

    def _check_caps(self, requests: Sequence[Request]) -> None:
        config, tokens, waiting = self.config, self.queued_tokens, len(self.waiting)
        most, more = config.max_queued_requests, len(requests)
        if most is not None and waiting and waiting + more > most:
            reason = f"{waiting} requests wait, and {more} more would exceed the {most} that may"
            raise QueueFullError(reason, self._retry_after(tokens))
        cap, more = config.max_queued_tokens, sum(len(request.prompt) for request in requests)
        if cap is not None and tokens and tokens + more > cap:
            reason = f"{tokens} prompt tokens wait, and {more} more would exceed the {cap} that may"
            raise QueueFullError(reason, self._retry_after(tokens))

    def _retry_after(self, tokens: int) -> float | None:
        return self.law.predict(StepShape().with_chunk(tokens, 0)) if self.law.knows else None

    def _append(self, request: Request, token: int) -> Outcome:
        request.output.append(token)
        reason = None
        if token in request.stop_ids:
            reason = FinishReason.STOP
        elif len(request.output) >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._release(request)
        return Outcome(request, token, reason)

    def _plan_decodes(self) -> Iterator[Slice]:
        # In rank order; victims are taken from the other end, so a victim never has a slice in this plan yet.
        for request in [r for r in self.running if r.decodes]:
            if request in self.running and self._make_room(request):
                yield self._slice(request, 1)

    def _plan_prefills(self, budget: PrefillBudget, now: float) -> Iterator[Slice]:
        for request in [r for r in self.running if not r.decodes]:
            if count := budget.grant(request.num_computed, request.remaining):
                yield self._slice(request, count)
        while not self._preempted and len(self.running) < self.config.max_num_seqs:
            head = self._head()  # nobody overtakes it
            if head is None:
                break
            cached = self.pool.match(self._reusable(head))
            if not self._fits(head, cached):
                break
            past = len(cached) * self.config.block_size
            count = budget.grant(past, head.num_tokens - past)
            if not count:
                break
            self._note_first_run(head, past, now)
            yield self._admit(head, cached, count)

    def _fits(self, request: Request, cached: list[int]) -> bool:
        """Whether all known tokens of a waiting request fit, with a block in reserve for each running one.

        Without the reserve a resumed request is preempted again at once (vLLM #25538).
        """
        needed = self._blocks_for(request.num_tokens) - len(cached) + self.pool.num_kept(cached)
        return needed + len(self.running) <= self.pool.num_free

    def _admit(self, request: Request, cached: list[int], count: int) -> Slice:
        """From waiting to running, with its cached blocks and those of its whole prefill."""
        self.pool.hold(cached)
        request.blocks += cached
        request.num_computed = len(cached) * self.config.block_size
        self.waiting.remove(request)
        insort(self.running, request, key=self._rank)
        admitted = self._slice(request, count)
        return replace(admitted, new_blocks=tuple(request.blocks))

    def _note_first_run(self, request: Request, cached: int, now: float) -> None:
        """Once a request, not again when it is resumed: retries must not count hits twice (vLLM #43736)."""
        if request.first_run is None:
            request.first_run, request.num_cached = now, cached
            self.counters.cache_queries += len(request.prompt)
            self.counters.cache_hits += cached

    def _make_room(self, request: Request) -> bool:
        """Free a block for the request's next token by preempting the last; False when that is itself."""
        while self._missing_blocks(request, 1) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._take_back(request)
        request.num_computed = 0
        insort(self.waiting, request, key=self._rank)
        self._preempted.append(request.id)
        self.counters.preemptions += 1

    def _release(self, request: Request) -> None:
        if request in self.running:
            self._take_back(request)
        else:
            self.waiting.remove(request)
        del self._order[request.id]
        self._freed.append(request.id)

    def _take_back(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free(request.blocks)
        request.blocks.clear()

    def _slice(self, request: Request, count: int) -> Slice:
        # An admitted request takes the blocks of its whole prefill with its first chunk.
        blocks = self.pool.allocate(self._missing_blocks(request, request.remaining))
        request.blocks += blocks
        return Slice(request, request.num_computed, count, tuple(blocks), samples=count == request.remaining)

    def _missing_blocks(self, request: Request, count: int) -> int:
        return max(self._blocks_for(request.num_computed + count) - len(request.blocks), 0)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _reusable(self, request: Request) -> list[Piece]:
        """The full blocks of what is known but the last token: that one is computed again, for its logits."""
        if not self.config.prefix_caching:
            return []
        return self._cut(request, (request.num_tokens - 1) // self.config.block_size)

    def _publish(self, request: Request, computed_before: int) -> None:
        """Let others find the blocks that the last step filled."""
        first, last = (tokens // self.config.block_size for tokens in (computed_before, request.num_computed))
        if self.config.prefix_caching and last > first:
            pieces = self._cut(request, last)
            for index in range(first, last):
                self.pool.publish(request.blocks[index], pieces[index])

    def _cut(self, request: Request, count: int) -> list[Piece]:
        """The first ``count`` blocks of the request's tokens as pieces; each is cut once."""
        size = self.config.block_size
        while len(request.pieces) < count:
            before = request.pieces[-1] if request.pieces else None
            request.pieces.append(next_piece(before, request.tokens(len(request.pieces) * size, size)))
        return request.pieces[:count]
