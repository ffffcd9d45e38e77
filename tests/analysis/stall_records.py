"""Records of streams and a prompt on an engine with whole steps, made without a server: every gap is chosen."""

from collections.abc import Sequence

from biphase.analysis.stall import Attack
from biphase.client.record import Chunk, Record

QUIET_S = 0.010
START = 100.0


def record(
    id: str, sent: float, stamps: Sequence[float], prompt: int, asked: int | None = None, **more: object
) -> Record:
    """One token a stamp."""
    return Record(
        id=id,
        intended=sent,
        sent=sent,
        first_byte=stamps[0] if stamps else None,
        chunks=tuple(Chunk(t, 1, "text") for t in stamps),
        ended=stamps[-1] if stamps else sent,
        prompt_tokens=prompt,
        prompt_tokens_source="usage",
        completion_tokens=len(stamps),
        completion_tokens_source="usage",
        asked_prompt_tokens=prompt,
        asked_completion_tokens=len(stamps) if asked is None else asked,
        **more,  # type: ignore[arg-type]
    )


def attack(prompt: int, passes: Sequence[float], victims: int = 2, quiet: int = 30, after: int = 10) -> Attack:
    """Streams get a token every 10 ms; then a prompt is run in ``passes`` of so many seconds, one token each."""
    stamps, now = [], START
    for step in [QUIET_S] * quiet + list(passes) + [QUIET_S] * after:
        now += step
        stamps.append(now)
    sent = stamps[quiet - 1] + 0.001
    first = stamps[quiet - 1 + len(passes)]
    streams = tuple(record(f"stream-{n}", START, [t + 1e-5 * n for t in stamps], 32) for n in range(victims))
    return Attack(record("prompt", sent, [first + 2e-4, first + QUIET_S], prompt), streams)
