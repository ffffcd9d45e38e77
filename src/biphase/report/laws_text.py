"""The laws and what they stand beside, as lines of text."""

from collections.abc import Iterator

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.chunk_probe import ChunkedPrefill
from biphase.analysis.chunk_size import is_narrow
from biphase.analysis.floor import Comparison
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.profile_result import ProfileResult


def significant(value: float) -> str:
    """Three significant digits; an exponent only below 0.001 and from a million on."""
    if value == 0:
        return "0"
    return (
        f"{value:.3g}"
        if abs(value) < 1e-3 or abs(value) >= 1e6
        else f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.3g}"
    )


def with_interval(found: Estimate) -> str:
    """The value and its 95 % interval."""
    return f"{significant(found.value)} [{significant(found.low)}, {significant(found.high)}]"


def law_lines(result: ProfileResult) -> Iterator[str]:
    """Both laws with intervals, then crossover, floor and chunks, as far as they are known."""
    if result.prefill_law is not None:
        yield from _prefill_lines(result.prefill_law)
    if result.decode_law is not None:
        yield _decode_line(result.decode_law)
    if result.chunked_prefill is not None:
        yield _chunk_line(result.chunked_prefill)
    if result.comparison is not None:
        yield from _comparison_lines(result.comparison)


def _prefill_lines(law: PrefillLaw) -> Iterator[str]:
    http = f"{significant(law.http_ms)} (HTTP) + " if law.http_ms is not None else ""
    yield (
        f"prefill law, ms: {http}{with_interval(law.a_ms)} + {with_interval(law.b_ms_per_token)} S + "
        f"{with_interval(law.c_ms_per_token2)} S² (95 % intervals; {law.samples} requests, {law.lengths} lengths, "
        f"residuals {law.rms_percent:.1f} % rms)"
    )
    if law.staircase is not None:
        yield (
            f"prefill runs in chunks of {law.staircase.chunk_tokens} tokens: each pass after the first adds "
            f"{with_interval(law.staircase.pass_ms)} ms"
        )
    if law.crossover_tokens is not None:
        yield (
            f"measured crossover: {with_interval(law.crossover_tokens)} tokens; a shorter prompt pays mostly the fixed "
            "price of a pass"
        )


def _decode_line(law: DecodeLaw) -> str:
    terms = [with_interval(law.t0_ms)]
    terms += [f"{with_interval(law.w_ms_per_sequence)} B"] if law.w_ms_per_sequence else []
    terms += [f"{with_interval(law.k_ms_per_token)} Σcontext"] if law.k_ms_per_token else []
    batches = ", ".join(map(str, law.batches))
    return (
        f"decode law, ms a step: {' + '.join(terms)} (95 % intervals; {law.samples} stretches, batches {batches}, "
        f"contexts {law.shortest_context:.0f} to {law.longest_context:.0f}, residuals {law.rms_percent:.1f} % rms)"
    )


def _chunk_line(found: ChunkedPrefill) -> str:
    if found.chunk_tokens_most is None:
        return (
            f"chunked prefill: not below {found.prompt_tokens} tokens; a prompt of that length held a stream beside it "
            f"up once, for {significant(found.worst_gap_ms)} ms (usual gap {significant(found.usual_gap_ms)} ms)"
        )
    known = is_narrow(found.chunk_tokens_least, found.chunk_tokens_most)
    size = f"about {found.chunk_tokens} tokens" if known else "a size that was not found"
    size += f" ({found.chunk_tokens_least} to {found.chunk_tokens_most})"
    return (
        f"chunked prefill: chunks of {size if found.single_size else 'no single size'}; a prompt of "
        f"{found.prompt_tokens} raised {found.raised_gaps} gaps of a stream beside it, the worst to "
        f"{significant(found.worst_gap_ms)} ms (usual gap {significant(found.usual_gap_ms)} ms)"
    )


def _comparison_lines(found: Comparison) -> Iterator[str]:
    computed = "none" if found.computed_crossover_tokens is None else f"{found.computed_crossover_tokens} tokens"
    yield (
        f"{found.model} on {found.device}, computed at peak: crossover {computed}, ridge point "
        f"{found.ridge_flop_per_byte:.0f} FLOP/B (bf16)"
    )
    if found.prefill_fraction is not None:
        yield (
            f"prefill of {found.prompt_tokens} tokens: {100 * found.prefill_fraction:.0f} % of its floor's speed "
            f"({_beside(found.prefill_floor_ms, found.prefill_measured_ms)})"
        )
    if found.floor_fraction is not None:
        parts = "; ".join(f"{p.name} {significant(p.ms)} ({p.source})" for p in found.parts)
        yield (
            f"decode at a context of {found.context_tokens}: {100 * found.floor_fraction:.0f} % of its floor's speed "
            f"({_beside(found.decode_floor_ms, found.decode_measured_ms)})"
        )
        yield f"where a step's ms go: {parts}"


def _beside(floor_ms: float | None, measured_ms: float | None) -> str:
    return f"floor {significant(floor_ms or 0.0)} ms, measured {significant(measured_ms or 0.0)} ms"
