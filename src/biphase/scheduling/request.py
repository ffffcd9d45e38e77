"""A request and its one counter.

``num_computed`` counts the tokens whose KV is in the cache; ``num_tokens`` counts the tokens that are known
(prompt and output). Each step lets the first catch up with the second. That one subtraction covers a chunk of
prefill, a decode, a prefix hit and the resumption after a preemption.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from biphase.scheduling.blocks import Piece


class FinishReason(StrEnum):
    """Why a request ended; ``stop`` and ``length`` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes the logits before a token is chosen; the defaults change nothing.

    ``repetition_penalty`` reads prompt and output, the other two read the output alone. ``logit_bias`` is
    (token, bias) pairs. No stop id may come before ``min_tokens`` tokens. ``grammar`` is a grammar as llguidance
    serialises it: only tokens that continue a text of it may come.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. ``temperature`` 0 is greedy; 0 for ``top_k`` and ``min_p`` and 1 for ``top_p``
    switch these filters off.

    ``seed`` and the token's position together key the random draw, so that the same request gives the same tokens
    whatever else runs in its batch and however often it is preempted. ``logprobs`` asks for the log-probability of
    each chosen token and of so many of the likeliest (0: of the chosen one alone). ``rules`` is None where no rule is
    set, as in nearly all requests: those rows are chosen without any work of their own. Values are checked where they
    enter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    logprobs: int | None = None
    rules: LogitRules | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probability of a chosen token, and the likeliest (token, log-probability) pairs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One request in the scheduler: its tokens, its blocks, and how far it has come.

    ``stop_ids`` end it with reason ``stop`` (the model's end-of-sequence ids unless the client said ignore_eos);
    ``max_tokens`` bounds the output; ``arrival`` is the caller's clock in seconds. A lower ``priority`` goes first.
    ``num_cached`` counts the prompt tokens that the prefix cache gave when the request was first admitted, at
    ``first_run`` on the same clock as ``arrival``; ``pieces`` are the full blocks of its tokens, as far as they have
    been cut. A ``held`` request has its place in the queue and may not run yet: the engine is still preparing it.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    priority: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    first_run: float | None = None
    pieces: list[Piece] = field(default_factory=list)
    held: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; 1 for a decode."""
        return self.num_tokens - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether the one token that remains is the last of the answer so far; else what remains is prefill."""
        return self.remaining == 1 and bool(self.output)

    def tokens(self, start: int, count: int) -> list[int]:
        """The token ids at positions ``start`` to ``start + count``, from prompt and output."""
        split = len(self.prompt)
        stop = start + count
        return [*self.prompt[start : min(stop, split)], *self.output[max(start - split, 0) : max(stop - split, 0)]]
