"""Which chunk of prefill keeps a wanted ITL, from the measured laws.

A pass that runs a chunk of ``C`` tokens behind ``p`` earlier ones beside streams that decode takes

    quiet ITL + b C + c ((p + C)^2 - p^2)

with ``b`` and ``c`` of the prefill law: the pass reads the weights once, and the quiet ITL has that already. The chunk
at the end of the prompt (``p = S - C``) is the dearest. Products of few rows hide behind the read of the weights, so
small chunks cost less than this says: what it advises is on the safe side.
"""

import math

import msgspec

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.laws import PrefillLaw


class ChunkAdvice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The largest chunk whose dearest pass keeps ``itl_slo_ms``; None when decoding alone takes longer.

    ``ttft_ms``: what the prompt's TTFT becomes with that chunk, ``ttft_whole_ms`` what it is in one piece.
    ``worst_gap_ms``: by the same law, of the server as it is (None where its chunk is unknown), to hold it against the
    measurement. The interval of the chunk is that of ``b`` and ``c`` together.
    """

    itl_slo_ms: float
    quiet_itl_ms: float
    prompt_tokens: int
    chunk_tokens: Estimate | None
    ttft_ms: float | None
    ttft_whole_ms: float
    worst_gap_ms: float | None
    curve: tuple[tuple[int, float, float], ...]


def advise(
    law: PrefillLaw, quiet_itl_ms: float, prompt_tokens: int, itl_slo_ms: float, chunk_tokens: int | None
) -> ChunkAdvice:
    """Largest chunk for ``itl_slo_ms``; ``chunk_tokens``: the server's own, the prompt's length when it runs whole."""

    def largest(b: float, c: float) -> int:
        return _largest_chunk(b, c, prompt_tokens, itl_slo_ms - quiet_itl_ms)

    b, c = law.b_ms_per_token, law.c_ms_per_token2
    best = largest(b.value, c.value)
    chunk = Estimate(best, largest(b.high, c.high), largest(b.low, c.low)) if best else None
    sizes = sorted({max(1, round(prompt_tokens / 2 ** (n / 4))) for n in range(41)})
    return ChunkAdvice(
        itl_slo_ms=itl_slo_ms,
        quiet_itl_ms=quiet_itl_ms,
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk,
        ttft_ms=chunked_ttft_ms(law, quiet_itl_ms, prompt_tokens, best) if best else None,
        ttft_whole_ms=law.ms(prompt_tokens),
        worst_gap_ms=pass_ms(law, quiet_itl_ms, prompt_tokens, chunk_tokens) if chunk_tokens else None,
        curve=tuple(
            (n, pass_ms(law, quiet_itl_ms, prompt_tokens, n), chunked_ttft_ms(law, quiet_itl_ms, prompt_tokens, n))
            for n in sizes
        ),
    )


def pass_ms(law: PrefillLaw, quiet_itl_ms: float, prompt_tokens: int, chunk: int) -> float:
    """The dearest pass in ms: the last full chunk of the prompt, beside the streams."""
    size = min(chunk, prompt_tokens)
    return quiet_itl_ms + _work(law.b_ms_per_token.value, law.c_ms_per_token2.value, prompt_tokens, size)


def chunked_ttft_ms(law: PrefillLaw, quiet_itl_ms: float, prompt_tokens: int, chunk: int) -> float:
    """TTFT in ms of a prompt in chunks: every pass carries the streams along."""
    work = law.b_ms_per_token.value * prompt_tokens + law.c_ms_per_token2.value * prompt_tokens**2
    return (law.http_ms or 0.0) + math.ceil(prompt_tokens / chunk) * quiet_itl_ms + work


def _work(b: float, c: float, prompt_tokens: int, chunk: int) -> float:
    return b * chunk + c * (prompt_tokens**2 - (prompt_tokens - chunk) ** 2)


def _largest_chunk(b: float, c: float, prompt_tokens: int, spare_ms: float) -> int:
    """Bisection over whole tokens: the work of the last chunk rises with its size."""
    low, high = 0, prompt_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = _work(b, c, prompt_tokens, middle) <= spare_ms
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
