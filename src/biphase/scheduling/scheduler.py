"""Which tokens run in the next step: decodes always, chunks of prefill in what the token budget leaves.

First come, first served. A waiting request is admitted only when the KV of all its known tokens fits, so that no two
half-admitted requests can wait for each other (vLLM #45388). When a decode finds no free block, the youngest running
request is preempted: its blocks go back and it recomputes prompt and output later (``num_computed = 0``).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from biphase.scheduling.blocks import BlockPool
from biphase.scheduling.plan import Slice, StepPlan, StepResult
from biphase.scheduling.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the pool. Tokens and blocks are counts; ``block_size`` is tokens per block."""

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens {self.max_num_batched_tokens}: "
                "every running sequence decodes one token in every step"
            )

    @property
    def max_request_tokens(self) -> int:
        """The longest request, prompt and output together, that can ever run."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought one request: a token, its end, or both."""

    request: Request
    token: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


class Scheduler:
    """State of all requests. ``plan`` decides a step, ``commit`` books its result; the caller runs it in between."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._freed: list[str] = []
        self._preempted: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def kv_usage(self) -> float:
        """Share of the pool that requests hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit is refused at once with ``ValueError`` (vLLM #39734)."""
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if total > self.config.max_request_tokens:
            raise ValueError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens exceed the limit of "
                f"{self.config.max_request_tokens}"
            )
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request in whatever state it is; False when it is not here (any more)."""
        for request in [*self.running, *self.waiting]:
            if request.id == request_id:
                self._release(request)
                return True
        return False

    def plan(self, now: float) -> StepPlan:
        """The next step at ``now`` (seconds, the caller's clock). Empty only when nothing waits or runs."""
        slices = list(self._plan_decodes())
        budget = self.config.max_num_batched_tokens - len(slices)
        slices += self._plan_prefills(budget)
        plan = StepPlan(tuple(slices), tuple(self._freed), tuple(self._preempted))
        self._freed, self._preempted = [], []
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Outcome]:
        """Book a step: tokens count as computed, sampled tokens are appended, ended requests are released."""
        outcomes = []
        for piece in plan.slices:
            request = piece.request
            if request.id in result.failed:
                self._release(request)
                outcomes.append(Outcome(request, None, FinishReason.ERROR, result.failed[request.id]))
                continue
            request.num_computed += piece.count
            if piece.samples:
                outcomes.append(self._append(request, result.tokens[request.id]))
        return outcomes

    def check(self) -> None:
        """Integrity of the pool; run when idle and after every test."""
        self.pool.check(block for request in self.running for block in request.blocks)
        if any(request.blocks or request.num_computed for request in self.waiting):
            raise AssertionError("a waiting request holds blocks or counts computed tokens")

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
        # Oldest first; victims are taken from the young end, so a victim never has a slice in this plan yet.
        for request in [r for r in self.running if r.remaining == 1]:
            if request in self.running and self._make_room(request):
                yield self._slice(request, 1)

    def _plan_prefills(self, budget: int) -> Iterator[Slice]:
        for request in [r for r in self.running if r.remaining > 1]:
            if budget > 0:
                count = min(budget, request.remaining)
                budget -= count
                yield self._slice(request, count)
        while budget > 0 and self._admit():
            request = self.running[-1]
            count = min(budget, request.remaining)
            budget -= count
            yield self._slice(request, count)

    def _admit(self) -> bool:
        """Move the head of the queue to running, if it fits whole. Nobody overtakes the head."""
        if not self.waiting or self._preempted or len(self.running) >= self.config.max_num_seqs:
            return False
        needed = self._blocks_for(self.waiting[0].num_tokens)
        # Each running sequence may need a block soon: without this reserve a resumed request is preempted at once
        # (vLLM #25538).
        if needed + len(self.running) > self.pool.num_free:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _make_room(self, request: Request) -> bool:
        """Free a block for the request's next token by preempting the youngest; False when that is itself."""
        while self._missing_blocks(request, 1) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._take_back(request)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self._preempted.append(request.id)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        if request in self.running:
            self._take_back(request)
        else:
            self.waiting.remove(request)
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
