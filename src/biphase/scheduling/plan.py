"""What one step runs, as pure data, and the protocol of whatever runs it.

The loop of the engine and of the simulator is the same three lines::

    plan = scheduler.plan(now)
    result = executor.run(plan)
    scheduler.commit(plan, result, now)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from biphase.scheduling.request import Request, TokenLogprobs
from biphase.scheduling.step_time import StepShape


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens ``start`` to ``start + count`` of one request, and the KV blocks newly given to it for them.

    The request's block table (``request.blocks``) already ends with ``new_blocks``. ``samples`` says that the slice
    reaches the request's last known token, so that its last row yields the next one.
    """

    request: Request
    start: int
    count: int
    new_blocks: tuple[int, ...] = ()
    samples: bool = True

    @property
    def is_decode(self) -> bool:
        """One row that continues an answer. Tokens of a prompt are prefill, also the one that a cache hit leaves."""
        return self.count == 1 and self.samples and self.start >= len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one step, decodes first; requests whose blocks went back to the pool since the last step."""

    slices: tuple[Slice, ...] = ()
    freed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def decode(self) -> tuple[Slice, ...]:
        return tuple(s for s in self.slices if s.is_decode)

    @property
    def prefill(self) -> tuple[Slice, ...]:
        return tuple(s for s in self.slices if not s.is_decode)

    @property
    def num_tokens(self) -> int:
        return sum(s.count for s in self.slices)

    @property
    def shape(self) -> StepShape:
        """What the step computes, as its time depends on it."""
        decode = self.decode
        shape = StepShape(len(decode), sum(s.start + 1 for s in decode))
        for s in self.prefill:
            shape = shape.with_chunk(s.count, s.start)
        return shape


@dataclass(frozen=True, slots=True)
class StepResult:
    """The next token of every slice that samples, by request id, and the requests that failed with their reason.

    ``seconds`` is what the step took on the executor's clock; the scheduler learns its step-time law from it.
    ``logprobs`` holds those of the requests that asked for them.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)


class Executor(Protocol):
    """Runs a plan: the engine's runner on a model, the simulator's on a virtual clock."""

    def run(self, plan: StepPlan) -> StepResult: ...
