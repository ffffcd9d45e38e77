"""The laws of both phases, fitted to records: what a prompt costs and what a decode step costs.

Prefill: ``TTFT(S) = http + a + b S + c S^2`` for S prompt tokens that had to be computed; with prompts run in chunks of
C tokens a pass costs ``d`` more each: ``+ d (ceil(S / C) - 1)``, a staircase. ``a`` is no network latency: it holds
the floor of a pass, the read of the weights. Decode: ``step = t0 + w B + k sum(context)``, of B streams.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from biphase.analysis.bootstrap import CONFIDENCE, Estimate, Fit, Vector, fit_relative
from biphase.analysis.latency import prefilled_tokens, ttft
from biphase.analysis.windows import StepSample, step_samples
from biphase.client.record import Record

CHUNK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEWEST_LENGTHS = 3
SPARE_SAMPLES = 3
"""Stretches beyond the constants of the decode law: with fewer their scatter cannot be told."""
HEAD_IS_EARLY = 0.5
"""Part of the TTFT before which a response's head cannot have waited for the prefill."""
FIRST_TOKEN_LATE_MS = 0.1
"""By how much the stamp of a first token can be late beside that of the head: a process that slept through a prefill
wakes more slowly (73 us more than between two tokens, median of 35 streams from a server with known laws)."""
TIMER_SLACK_MS = 0.05
"""By how much a server's waits can end late, each of them alike, so that no scatter shows it: Linux lets a timer be so
late to wake processes together (prctl(2), PR_SET_TIMERSLACK)."""
LATE_MS = FIRST_TOKEN_LATE_MS + TIMER_SLACK_MS
"""Of a TTFT, for which a server waits and then a client."""
STAIRCASE_LENGTHS = 8
"""Distinct lengths from which a staircase can be told from a parabola."""
DECISIVE = 10.0
"""Difference of AICc from which the staircase is preferred: Burnham and Anderson's "essentially no support"."""


class Staircase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts are prefilled in chunks: the size that explains the times best, and what each further pass costs."""

    chunk_tokens: int
    pass_ms: Estimate


class PrefillLaw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``TTFT(S) = http_ms + a_ms + b S + c S^2`` (ms, tokens), with 95 % bootstrap intervals.

    ``http_ms`` was measured apart (None: it was not, and ``a_ms`` holds it). ``crossover_tokens`` is ``a / b``: below
    it the fixed price of a pass weighs more than its tokens. ``rms_percent``: relative residuals. ``residuals``:
    percent of the measured time, (prompt tokens, residual) each.
    """

    a_ms: Estimate
    b_ms_per_token: Estimate
    c_ms_per_token2: Estimate
    http_ms: float | None
    crossover_tokens: Estimate | None
    staircase: Staircase | None
    samples: int
    lengths: int
    longest_tokens: int
    rms_percent: float
    residuals: tuple[tuple[int, float], ...]

    def ms(self, tokens: float) -> float:
        """TTFT in ms that a client sees of a prompt."""
        curve = self.a_ms.value + self.b_ms_per_token.value * tokens + self.c_ms_per_token2.value * tokens**2
        passes = np.ceil(tokens / self.staircase.chunk_tokens) - 1 if self.staircase else 0
        extra = passes * self.staircase.pass_ms.value if self.staircase else 0.0
        return float(curve + extra + (self.http_ms or 0.0))


class DecodeLaw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``step = t0_ms + w B + k sum(context)`` (ms, sequences, tokens), with 95 % bootstrap intervals.

    ``w_ms_per_sequence`` is None where one batch only was measured: ``t0_ms`` holds it then. ``k`` is None where the
    contexts did not differ.
    """

    t0_ms: Estimate
    w_ms_per_sequence: Estimate | None
    k_ms_per_token: Estimate | None
    batches: tuple[int, ...]
    samples: int
    shortest_context: float
    longest_context: float
    rms_percent: float
    residuals: tuple[tuple[int, float, float], ...]

    def ms(self, batch: float, context: float) -> float:
        """Step time in ms of ``batch`` streams with ``context`` tokens each."""
        per_sequence = self.w_ms_per_sequence.value if self.w_ms_per_sequence else 0.0
        per_token = self.k_ms_per_token.value if self.k_ms_per_token else 0.0
        return self.t0_ms.value + per_sequence * batch + per_token * batch * context


def fit_prefill(
    records: Sequence[Record], http_s: Sequence[float] = (), chunk_tokens: int | None = None
) -> PrefillLaw | None:
    """The law of prompts that were prefilled alone; None with fewer than three lengths or too few samples.

    ``http_s``: seconds of HTTP round trips that computed nothing. ``chunk_tokens``: the size of the chunks, where it
    is known; the staircase is then part of the law.
    """
    pairs = [(tokens, seconds) for r in records for tokens, seconds in [_prefill_sample(r)] if tokens and seconds]
    if len({tokens for tokens, _ in pairs}) < FEWEST_LENGTHS or len(pairs) <= FEWEST_LENGTHS + 1:
        return None
    tokens = np.array([float(n) for n, _ in pairs])
    times = np.array([1e3 * t for _, t in pairs])
    chosen, staircase = _known_staircase(tokens, times, chunk_tokens) or _with_staircase(tokens, times)
    return PrefillLaw(
        a_ms=_without_http(chosen, [1e3 * t for t in http_s]),
        b_ms_per_token=chosen.coefficient(1),
        c_ms_per_token2=chosen.coefficient(2),
        http_ms=1e3 * float(np.median(http_s)) if len(http_s) else None,
        crossover_tokens=_crossover(chosen, http_s),
        staircase=staircase,
        samples=len(times),
        lengths=len(set(tokens)),
        longest_tokens=int(tokens.max()),
        rms_percent=100 * chosen.rms,
        residuals=tuple((int(n), 100 * float(r)) for n, r in zip(tokens, chosen.residuals, strict=True)),
    )


def http_share(records: Sequence[Record], round_trip_s: Sequence[float]) -> Sequence[float]:
    """Samples of the seconds that HTTP and the API take of a TTFT.

    Servers that send the head of a response before they prefill (well before any token) show it in each request;
    others only by ``round_trip_s``, GETs that compute nothing. The longer is taken: a GET parses no prompt.
    """
    heads = [(r.first_byte - r.sent, t) for r in records if r.first_byte is not None and (t := ttft(r))]
    early = [head for head, first in heads if head < HEAD_IS_EARLY * first]
    if len(early) < max(3, 0.9 * len(heads)) or (len(round_trip_s) and np.median(early) < np.median(round_trip_s)):
        return round_trip_s
    return early


def _prefill_sample(record: Record) -> tuple[int | None, float | None]:
    return (prefilled_tokens(record) or record.asked_prompt_tokens), ttft(record)


def _parabola(tokens: Vector) -> Vector:
    return np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)


def _without_http(fit: Fit, http_ms: Sequence[float]) -> Estimate:
    """``a`` less the HTTP share, uncertain by its outer tenths: the trips inside the TTFTs are as uneven."""
    if not http_ms:
        return fit.coefficient(0)
    drawn = np.random.default_rng(1).choice(http_ms, len(fit.replicates))
    drawn = np.clip(drawn, *np.percentile(http_ms, [10, 90]))
    value = max(float(fit.coefficients[0]) - float(np.median(http_ms)), 0.0)
    return fit.interval(value, fit.replicates[:, 0] - drawn, lambda rows: rows[..., 0])


def _crossover(fit: Fit, http_s: Sequence[float]) -> Estimate | None:
    """``a / b``, where the law has a slope at all."""
    http = 1e3 * float(np.median(http_s)) if len(http_s) else 0.0
    if fit.coefficients[1] <= 0 or np.mean(fit.replicates[:, 1] > 0) < CONFIDENCE:
        return None
    return fit.estimate(lambda rows: np.maximum(rows[..., 0] - http, 0) / np.maximum(rows[..., 1], 1e-12))


def _known_staircase(tokens: Vector, times: Vector, chunk_tokens: int | None) -> tuple[Fit, Staircase] | None:
    """The staircase of a known chunk size; None where no prompt, or every one, takes more than one pass."""
    if chunk_tokens is None or len(times) < 6 or not tokens.min() <= chunk_tokens < tokens.max():
        return None
    fit = fit_relative(_stairs(tokens, chunk_tokens), times, LATE_MS)
    return fit, Staircase(chunk_tokens, fit.coefficient(3))


def _stairs(tokens: Vector, chunk_tokens: int) -> Vector:
    return np.column_stack([_parabola(tokens), np.ceil(tokens / chunk_tokens) - 1])


def _with_staircase(tokens: Vector, times: Vector) -> tuple[Fit, Staircase | None]:
    """The parabola, unless a staircase of some chunk size explains the times decisively better."""
    parabola = fit_relative(_parabola(tokens), times, LATE_MS)
    sizes = [size for size in CHUNK_SIZES if tokens.min() <= size < tokens.max()]
    if len(set(tokens)) < STAIRCASE_LENGTHS or len(times) < 8:
        return parabola, None
    fits = {n: fit_relative(_stairs(tokens, n), times, LATE_MS) for n in sizes}
    best = min(fits, key=lambda n: _aicc(fits[n], 5), default=None)  # the size is a constant too
    if best is None or _aicc(fits[best], 5) > _aicc(parabola, 3) - DECISIVE:
        return parabola, None
    further = fits[best].coefficient(3)
    return (fits[best], Staircase(best, further)) if further.low > 0 else (parabola, None)


def _aicc(fit: Fit, constants: int) -> float:
    """Akaike's criterion for normal relative errors, corrected for few samples."""
    n, parameters = len(fit.residuals), constants + 1
    squares = max(float(np.sum(fit.weights * fit.residuals**2)), 1e-18)
    return n * float(np.log(squares / n)) + 2 * parameters * n / (n - parameters - 1)


def fit_decode(records: Sequence[Record]) -> DecodeLaw | None:
    """The law of decode steps from every stretch of steady decoding in the records; None without enough of them."""
    return decode_law(step_samples(records))


def decode_law(samples: Sequence[StepSample]) -> DecodeLaw | None:
    """The law behind samples of the step time; constants that the samples cannot tell apart are left out."""
    positive = [sample for sample in samples if sample.seconds > 0]
    batches = sorted({sample.batch for sample in positive})
    contexts = [sample.context_sum / sample.batch for sample in positive]
    varied = len(positive) > 1 and max(contexts) >= 1.5 * min(contexts) + 16
    columns = [np.ones(len(positive))]
    columns += [np.array([float(s.batch) for s in positive])] if len(batches) > 1 else []
    columns += [np.array([s.context_sum for s in positive])] if varied else []
    if len(positive) < len(columns) + SPARE_SAMPLES:
        return None
    fit = fit_relative(np.stack(columns, axis=1), [1e3 * s.seconds for s in positive], TIMER_SLACK_MS)
    return DecodeLaw(
        t0_ms=fit.coefficient(0),
        w_ms_per_sequence=fit.coefficient(1) if len(batches) > 1 else None,
        k_ms_per_token=fit.coefficient(len(columns) - 1) if varied else None,
        batches=tuple(batches),
        samples=len(positive),
        shortest_context=min(contexts),
        longest_context=max(contexts),
        rms_percent=100 * fit.rms,
        residuals=tuple(
            (s.batch, c, 100 * float(r)) for s, c, r in zip(positive, contexts, fit.residuals, strict=True)
        ),
    )
