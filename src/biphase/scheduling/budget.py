"""How much prefill a step takes beside its decodes: in tokens always, in milliseconds where an ITL budget is set."""

from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.step_time import StepShape, StepTimeLaw

LEAST_CHUNK = 16
"""Prefill gets this many tokens even where the decodes alone fill the budget: neither phase starves the other."""
NOISE_MARGIN = 1.25
"""Standard deviations of the prediction's error that are kept free, but never more than half of the budget."""


class PrefillBudget:
    """The budget of one step. Ask ``grant`` for each prompt in turn; what it grants is spent."""

    def __init__(self, config: SchedulerConfig, law: StepTimeLaw, decode: StepShape) -> None:
        self._chunked = config.chunked_prefill
        self._tokens = config.max_num_batched_tokens - decode.decodes
        self._shape = decode
        self._law = law
        self._seconds: float | None = None
        if config.itl_budget_ms is not None and decode.decodes and law.knows:
            budget = config.itl_budget_ms / 1000
            self._seconds = budget / (1 + min(NOISE_MARGIN * law.noise, 1))

    @property
    def left(self) -> bool:
        """Whether another prompt may get tokens."""
        return self._tokens > 0

    def grant(self, past: int, wanted: int) -> int:
        """Tokens of a prompt with ``past`` computed and ``wanted`` uncomputed ones that run in this step."""
        if not self.left:
            return 0
        granted = min(wanted, self._tokens) if self._chunked else wanted
        if self._seconds is not None:
            fitting = self._law.largest_chunk(self._shape, past, granted, self._seconds)
            least = min(LEAST_CHUNK, granted) if not self._shape.chunk else 0
            if fitting < granted:
                self._tokens = 0  # the milliseconds are spent; a later prompt would overrun them
            granted = max(fitting, least)
        self._tokens -= granted
        self._shape = self._shape.with_chunk(granted, past)
        return granted
