"""Signs in the records that a measurement is not what it looks like, each as one line for the user."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from biphase.analysis.latency import spread, ttft
from biphase.client.record import Record

Check = Callable[[Sequence[Record]], str | None]

UNSTEADY = 0.25
"""Half the interquartile range of the TTFT at one length, as part of its median, from which a profile is no profile."""


def warnings(records: Sequence[Record], own_tokens: int = 0) -> list[str]:
    """One line for each thing that spoils the numbers; ``own_tokens``: prompt tokens the server adds, always cached."""
    checks: Iterable[Check] = (
        ended_early,
        chunks_not_tokens,
        lambda found: cache_answered(found, own_tokens),
        length_differs,
        unsteady,
    )
    return [line for check in checks if (line := check(records)) is not None]


def ended_early(records: Sequence[Record]) -> str | None:
    """Fewer tokens than asked for: the model ended its answer (EOS) and the server let it."""
    short = [r for r in records if (r.completion_tokens or 0) < (r.asked_completion_tokens or 0)]
    if not short:
        return None
    fewest, asked = min(r.completion_tokens or 0 for r in short), short[0].asked_completion_tokens
    return (
        f"{len(short)} of {len(records)} answers ended early, the shortest after {fewest} of {asked} tokens: "
        "decode numbers rest on fewer tokens (the server does not honour ignore_eos)"
    )


def chunks_not_tokens(records: Sequence[Record]) -> str | None:
    """Chunks and tokens differ in number: a gap between chunks is not the time of one token."""
    uneven = [r for r in records if r.completion_tokens and len(r.token_chunks) != r.completion_tokens]
    if uneven:
        tokens, chunks = sum(r.completion_tokens or 0 for r in uneven), sum(len(r.token_chunks) for r in uneven)
        how = (
            "counted by the server chunk by chunk"
            if _all_counted(uneven)
            else "spread over the chunks by length of text"
        )
        return (
            f"chunks are not tokens: {tokens / chunks:.2f} tokens a chunk in {len(uneven)} of {len(records)} answers; "
            f"gaps are divided by the tokens of the chunk, {how}"
        )
    if any(r.completion_tokens_source == "chunks" for r in records):
        return "the server reports no token counts: one token a chunk is assumed"
    return None


def _all_counted(records: Sequence[Record]) -> bool:
    return all(r.completion_tokens_source == "continuous_usage" for r in records)


def cache_answered(records: Sequence[Record], own_tokens: int = 0) -> str | None:
    """Prompt tokens came from a prefix cache; one beyond the server's own is chance (the same first token)."""
    cached = [r for r in records if (r.cached_tokens or 0) > own_tokens + 1]
    if not cached:
        return None
    worst = max(cached, key=lambda r: r.cached_tokens or 0)
    return (
        f"the server's prefix cache answered in {len(cached)} of {len(records)} requests (up to {worst.cached_tokens} "
        f"of {worst.prompt_tokens} prompt tokens): prefill is measured on the rest alone"
    )


def length_differs(records: Sequence[Record]) -> str | None:
    """The server counted other prompt lengths than were asked for."""
    off = [r for r in records if r.prompt_tokens is not None and r.prompt_tokens != r.asked_prompt_tokens]
    if not off:
        return None
    worst = max(off, key=lambda r: abs((r.prompt_tokens or 0) - (r.asked_prompt_tokens or 0)))
    truncated = (worst.prompt_tokens or 0) < 0.9 * (worst.asked_prompt_tokens or 0)
    return (
        f"{len(off)} of {len(records)} prompts were not of the length asked for "
        f"({worst.prompt_tokens} tokens counted for {worst.asked_prompt_tokens}): rates use the server's count"
        + ("; it seems to cut long prompts" if truncated else "")
    )


def unsteady(records: Sequence[Record]) -> str | None:
    """Requests of the same length take very different times: something else runs on the machine or on the server."""
    by_length: dict[int | None, list[float | None]] = defaultdict(list)
    for record in records:
        by_length[record.asked_prompt_tokens].append(ttft(record))
    spreads = ((spread(times), length) for length, times in by_length.items())
    known = [(found.relative, length) for found, length in spreads if found is not None and found.n > 2]
    widest, length = max(known, key=lambda pair: pair[0], default=(0.0, None))
    if widest < UNSTEADY:
        return None
    return (
        f"prefill of the same length varies by {100 * widest:.0f} % (half the interquartile range, prompt of "
        f"{length}): the machine or the server was busy with something else; measure again when it is quiet"
    )
