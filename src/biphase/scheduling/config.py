"""The limits that a scheduler keeps."""

from dataclasses import dataclass

COUNTS = ("num_blocks", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, of the pool and of the queue. Tokens, blocks and requests are counts.

    ``itl_budget_ms`` bounds the predicted time of a step in which sequences decode: prefill gets what they leave.
    Without ``chunked_prefill`` each prompt runs whole in one step. ``max_queued_requests`` and ``max_queued_tokens``
    (prompt tokens) bound what waits; None does not.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    itl_budget_ms: float | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("itl_budget_ms", "max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.itl_budget_ms is not None and not self.chunked_prefill:
            raise ValueError("itl_budget_ms needs chunked prefill: a whole prompt cannot be made to fit a budget")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} exceeds max_num_batched_tokens {self.max_num_batched_tokens}: "
                "every running sequence decodes one token in every step"
            )

    @property
    def max_request_tokens(self) -> int:
        """The longest request, prompt and output together, that can ever run."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
