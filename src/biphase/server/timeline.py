"""One request of the engine on the server's clock."""

from dataclasses import dataclass

from biphase.engine.messages import Output, Submit


@dataclass(slots=True)
class Timeline:
    """Times in seconds of ``time.monotonic``: ``submitted`` to the engine, ``first`` and ``last`` output with tokens.

    ``queue_seconds`` is the engine's own count. ``reason`` is None until the answer is complete, and stays so where it
    ``failed`` in the engine or was given up; ``refused`` is the error code of an engine that did not take it.
    """

    prompt_tokens: int
    max_tokens: int
    submitted: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    reason: str | None = None
    failed: bool = False
    refused: str | None = None

    @classmethod
    def of(cls, submit: Submit, now: float) -> "Timeline":
        """That of a request which is handed to the engine now."""
        return cls(len(submit.prompt), submit.max_tokens, now)

    def note_first(self, output: Output) -> None:
        """What the first output alone tells."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.queue_seconds = output.queue_seconds or self.queue_seconds

    def note(self, output: Output, now: float) -> None:
        """Take an output with tokens."""
        self.first = now if self.first is None else self.first
        self.last = now
        self.tokens += len(output.tokens)
