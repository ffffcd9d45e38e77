"""A profile in a few sentences that a person can repeat: what one user gets, what limits it, what would help most."""

from collections.abc import Iterator
from typing import NamedTuple

from biphase.analysis.floor import Comparison
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.profile_result import LengthRow, ProfileResult

USUAL_PROMPT = 512
USUAL_ANSWER = 256  # tokens of the request that the advice is priced on


def number(value: float) -> str:
    """About three significant digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def plain_words(result: ProfileResult) -> list[str]:
    """Three or four sentences; none where nothing was measured."""
    row = _usual_row(result)
    if row is None:
        return []
    found = [_one_user(row), _prefill(result.prefill_law, row), _decode(result.decode_law, result.comparison)]
    return [line for line in (*found, advice(result, row)) if line is not None]


def _usual_row(result: ProfileResult) -> LengthRow | None:
    rows = [row for row in result.rows if row.decode_ms_per_token is not None] or list(result.rows)
    return min(rows, key=lambda row: abs(row.prompt_tokens - USUAL_PROMPT), default=None)


def _one_user(row: LengthRow) -> str:
    wait = number(row.ttft_ms.median)
    first = f"With a prompt of {row.prompt_tokens} tokens one user waits {wait} ms for the first token"
    if row.decode_tok_per_s is None or row.decode_ms_per_token is None:
        return f"{first}."
    return (
        f"{first}, then gets {number(row.decode_tok_per_s.median)} tokens/s "
        f"(one every {number(row.decode_ms_per_token.median)} ms)."
    )


def _prefill(law: PrefillLaw | None, row: LengthRow) -> str | None:
    if law is None:
        return None
    tokens = row.prompt_tokens
    parts = {
        "the fixed price of a pass": law.a_ms.value,
        "work for each token (matrix products)": law.b_ms_per_token.value * tokens,
        "attention between the tokens": law.c_ms_per_token2.value * tokens**2,
        "HTTP": law.http_ms or 0.0,
    }
    if law.staircase is not None:
        parts["further passes, one a chunk"] = law.ms(tokens) - sum(parts.values())
    return f"That wait is mostly {_largest(parts, max(sum(parts.values()), 1e-9))}."


def _largest(parts: dict[str, float], whole: float) -> str:
    name = max(parts, key=lambda part: parts[part])
    return f"{name}: {number(parts[name])} of {number(whole)} ms"


def _decode(law: DecodeLaw | None, comparison: Comparison | None) -> str | None:
    if comparison is not None and not comparison.impossible and comparison.floor_fraction and comparison.parts:
        step, floor = comparison.decode_measured_ms or 0.0, comparison.decode_floor_ms or 0.0
        beyond = {part.name: part.ms for part in comparison.parts if part.source != "computed"}
        where = f"; most of the rest is {_largest(beyond, step)}" if step > floor else ""
        return (
            f"A decode step of {number(step)} ms is at {100 * comparison.floor_fraction:.0f} % of what "
            f"{comparison.device} permits ({number(floor)} ms to read weights and cache once){where}."
        )
    if law is None:
        return None
    context = law.k_ms_per_token.value * law.longest_context if law.k_ms_per_token else 0.0
    parts = {"the same at any context (weights and overhead)": law.ms(1, 0), "attention to the context": context}
    most = _largest(parts, sum(parts.values()))
    return f"At {law.longest_context:,.0f} tokens of context a decode step is mostly {most}."


class Change(NamedTuple):
    """A change, and the milliseconds that it takes off the usual request."""

    what: str
    saves_ms: float


def advice(result: ProfileResult, row: LengthRow) -> str | None:
    """The change that saves most of one user's request; batching where none is known to save a twentieth of it."""
    if row.decode_ms_per_token is None:
        return None
    whole = row.ttft_ms.median + USUAL_ANSWER * row.decode_ms_per_token.median
    best = max(_changes(result, row), key=lambda change: change.saves_ms, default=None)
    if best is not None and best.saves_ms >= 0.05 * whole:
        return (
            f"What would help one user most: {best.what}; of {number(whole)} ms for this prompt and {USUAL_ANSWER} "
            f"tokens it should save up to {number(best.saves_ms)} ms ({100 * best.saves_ms / whole:.0f} %)."
        )
    return _batching(result.decode_law, row.prompt_tokens)


def _changes(result: ProfileResult, row: LengthRow) -> Iterator[Change]:
    law, comparison = result.prefill_law, result.comparison
    if law is not None and row.prompt_tokens >= 2:
        saved = law.ms(row.prompt_tokens) - law.ms(row.prompt_tokens // 2)
        yield Change("a prefix cache for what prompts share (half of each, say)", saved)
    for part in comparison.parts if comparison and not comparison.impossible else ():
        if part.source == "computed" and part.name.startswith("weights"):
            yield Change("weights in half the bytes", USUAL_ANSWER * part.ms / 2)
        elif part.name.startswith("fixed") and part.ms > 0:
            yield Change("less fixed overhead in a decode step (launches, sampling, scheduler)", USUAL_ANSWER * part.ms)


def _batching(law: DecodeLaw | None, context: int) -> str | None:
    if law is None or law.w_ms_per_sequence is None:
        return None
    most = max(law.batches)
    one, many = 1e3 / law.ms(1, context), most * 1e3 / law.ms(most, context)
    return (
        f"What would help most: more requests at a time; {most} streams get {number(many)} tokens/s together, "
        f"one alone {number(one)} (by the fitted law)."
    )
