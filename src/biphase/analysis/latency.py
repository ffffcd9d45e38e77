"""Latencies of one request as functions of its ``Record``, and medians with their spread.

Definitions follow ``vllm bench serve`` where it has one; each docstring gives its formula. ``t_i`` are the arrival
times of the chunks that carry generated tokens (never a role or usage chunk), ``n_i`` their tokens, ``i = 1..m``.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from biphase.client.record import Record


def ttft(record: Record) -> float | None:
    """Time to first token in seconds: ``t_1 - sent``. None when no token came."""
    chunks = record.token_chunks
    return chunks[0].t - record.sent if chunks else None


def e2e(record: Record) -> float | None:
    """End-to-end latency in seconds: ``t_m - sent``, to the last generated token. None when no token came."""
    chunks = record.token_chunks
    return chunks[-1].t - record.sent if chunks else None


def chunk_gaps(record: Record) -> list[float]:
    """Gaps as the reader of the stream feels them, in seconds: ``t_(i+1) - t_i``. The first wait is none of them."""
    return [after.t - before.t for before, after in pairwise(record.token_chunks)]


def itl(record: Record) -> list[float]:
    """Inter-token latencies in seconds: ``(t_(i+1) - t_i) / n_(i+1)``, once for each of the ``n_(i+1)`` tokens.

    With one token a chunk these are the chunk gaps, which is vLLM's ITL.
    """
    chunks = record.token_chunks
    return [
        gap / chunk.tokens
        for gap, chunk in zip(chunk_gaps(record), chunks[1:], strict=True)
        for _ in range(chunk.tokens)
    ]


def tpot(record: Record) -> float | None:
    """Time per output token after the first chunk, in seconds: ``(t_m - t_1) / (n_2 + ... + n_m)``.

    vLLM's TPOT where the first chunk holds one token; a first chunk of several is not credited to decode. None when
    all tokens came in one chunk.
    """
    chunks = record.token_chunks
    tokens = sum(chunk.tokens for chunk in chunks[1:])
    return (chunks[-1].t - chunks[0].t) / tokens if tokens else None


def decode_rate(record: Record) -> float | None:
    """Tokens after the first chunk per second of decode: ``(n_2 + ... + n_m) / (t_m - t_1)``."""
    per_token = tpot(record)
    return 1.0 / per_token if per_token else None


def prefilled_tokens(record: Record) -> int | None:
    """Prompt tokens that the server had to compute: its count less those its prefix cache answered."""
    if record.prompt_tokens is None:
        return None
    return max(1, record.prompt_tokens - (record.cached_tokens or 0))


def prefill_rate(record: Record) -> float | None:
    """Prompt tokens computed per second until the first token: ``prefilled_tokens / TTFT``."""
    tokens, seconds = prefilled_tokens(record), ttft(record)
    return tokens / seconds if tokens and seconds else None


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median, quartiles (linear interpolation), extremes and number of some samples, in the samples' unit."""

    median: float
    p25: float
    p75: float
    min: float
    max: float
    n: int

    @property
    def half_iqr(self) -> float:
        """Half the interquartile range: what follows the sign ± in the tables."""
        return (self.p75 - self.p25) / 2

    @property
    def relative(self) -> float:
        """``half_iqr`` over the median."""
        return self.half_iqr / self.median if self.median else 0.0


def spread(samples: Iterable[float | None], scale: float = 1.0) -> Spread | None:
    """Spread of the samples that are there, times ``scale`` (1000 turns seconds into ms); None when there is none."""
    values = [scale * value for value in samples if value is not None]
    if not values:
        return None
    low, p25, median, p75, high = (float(q) for q in np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
    return Spread(median, p25, p75, low, high, len(values))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between order statistics, as numpy and vLLM's bench compute it."""
    return float(np.percentile(samples, percent))
