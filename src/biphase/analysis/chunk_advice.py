"""Which chunk of prefill keeps a wanted ITL, from the measured laws.

A pass that runs a chunk of ``C`` tokens behind ``p`` earlier ones beside streams that decode takes

    floor + b C + c ((p + C)^2 - p^2)

with ``b`` and ``c`` of the prefill law. The floor is the quiet ITL, or what the law finds a pass of prefill to cost
before its first token where that is more: both read the weights, and a pass does so once. The chunk at the end of the
prompt (``p = S - C``) is the dearest. Products of few rows hide behind the read of the weights, so small chunks cost
less than this says: what it advises is on the safe side.
"""

import math
from dataclasses import dataclass

import msgspec

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.laws import PrefillLaw

MOST_WIDE = 5.0
"""High over low end of an advised chunk's interval from which the law says nothing of it."""


class ChunkAdvice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The largest chunk whose dearest pass keeps ``itl_slo_ms``; None when the floor of a pass alone is longer.

    ``ttft_ms``: what the prompt's TTFT becomes with that chunk; ``ttft_alone_ms``: what the law gives for it with
    nothing beside it. ``worst_gap_ms``: by the same law, of the server as it is (None where its chunk is unknown), to
    hold it against the measurement. The interval of the chunk is that of ``b`` and ``c`` together. ``curve``: tokens
    of a chunk, worst gap and TTFT in ms.
    """

    itl_slo_ms: float
    quiet_itl_ms: float
    pass_floor_ms: float
    prompt_tokens: int
    chunk_tokens: Estimate | None
    ttft_ms: float | None
    ttft_alone_ms: float
    worst_gap_ms: float | None
    curve: tuple[tuple[int, float, float], ...]

    @property
    def found(self) -> bool:
        """Whether the law knows the chunk: its interval is not as wide as all that a chunk can be."""
        return self.chunk_tokens is None or self.chunk_tokens.high <= MOST_WIDE * self.chunk_tokens.low


def advise(
    law: PrefillLaw, quiet_itl_ms: float, prompt_tokens: int, itl_slo_ms: float, chunk_tokens: int | None
) -> ChunkAdvice:
    """Largest chunk for ``itl_slo_ms``; ``chunk_tokens``: the server's own, the prompt's length when it runs whole."""
    passes = Passes(law, quiet_itl_ms, prompt_tokens)
    chunk = passes.largest_chunk(itl_slo_ms)
    sizes = sorted({max(1, round(prompt_tokens / 2 ** (n / 4))) for n in range(41)})
    return ChunkAdvice(
        itl_slo_ms=itl_slo_ms,
        quiet_itl_ms=quiet_itl_ms,
        pass_floor_ms=passes.floor_ms,
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk,
        ttft_ms=passes.ttft_ms(int(chunk.value)) if chunk else None,
        ttft_alone_ms=law.ms(prompt_tokens),
        worst_gap_ms=passes.worst_ms(chunk_tokens) if chunk_tokens else None,
        curve=tuple((n, passes.worst_ms(n), passes.ttft_ms(n)) for n in sizes),
    )


@dataclass(frozen=True)
class Passes:
    """The passes in which one prompt is prefilled beside streams, by the law."""

    law: PrefillLaw
    quiet_itl_ms: float
    prompt_tokens: int

    @property
    def floor_ms(self) -> float:
        """What a pass costs before the first token of its chunk."""
        stairs = self.law.staircase
        return max(self.quiet_itl_ms, stairs.pass_ms.value if stairs else self.law.a_ms.value)

    def worst_ms(self, chunk: int) -> float:
        """The dearest pass in ms: the last full chunk of the prompt, beside the streams."""
        return self.floor_ms + self._work(
            self.law.b_ms_per_token.value, self.law.c_ms_per_token2.value, min(chunk, self.prompt_tokens)
        )

    def ttft_ms(self, chunk: int) -> float:
        """TTFT in ms of the prompt in chunks: every pass carries the streams along."""
        work = self._work(self.law.b_ms_per_token.value, self.law.c_ms_per_token2.value, self.prompt_tokens)
        return (self.law.http_ms or 0.0) + math.ceil(self.prompt_tokens / chunk) * self.floor_ms + work

    def largest_chunk(self, itl_slo_ms: float) -> Estimate | None:
        """Tokens of the largest chunk that keeps the ITL, with the interval of ``b`` and ``c``; None when none does."""
        b, c, spare = self.law.b_ms_per_token, self.law.c_ms_per_token2, itl_slo_ms - self.floor_ms
        best = self._largest(b.value, c.value, spare)
        if not best:
            return None
        return Estimate(best, self._largest(b.high, c.high, spare), self._largest(b.low, c.low, spare))

    def _work(self, b: float, c: float, chunk: int) -> float:
        return b * chunk + c * (self.prompt_tokens**2 - (self.prompt_tokens - chunk) ** 2)

    def _largest(self, b: float, c: float, spare_ms: float) -> int:
        """Bisection over whole tokens: the work of the last chunk rises with its size."""
        low, high = 0, self.prompt_tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._work(b, c, middle) <= spare_ms
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
