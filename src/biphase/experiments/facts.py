"""The facts of a run beside its records: versions, the server, and what it did for others meanwhile."""

import asyncio
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from biphase.client.negotiation import Target
from biphase.client.record import Record, RunFacts, ServerCounts
from biphase.client.scrape import GENERATED, ITL, PROMPTED, PROMPTED_UNCACHED, RUNNING, TTFT, Scrape, scrape

INTERRUPTED = "interrupted"
SETTLE_S = 0.25  # engines count a step's tokens a moment after they send them
SETTLES = 4


def versions(version: str) -> dict[str, str]:
    """Of biphase, Python and the client's machine."""
    return {"biphase": version, "python": platform.python_version(), "platform": platform.platform()}


def now() -> str:
    """UTC in seconds, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_facts(
    target: Target, tokens: int, repeats: int, version: str, command: Sequence[str], before: Scrape | None
) -> RunFacts:
    """The facts at the start of a run; ``before``: what the server counted then."""
    busy = before.value(RUNNING) if before else None
    return RunFacts(
        command=shlex.join(command),
        versions=versions(version),
        started=now(),
        url=target.api.base,
        model=target.api.model,
        tokens=tokens,
        repeats=repeats,
        own_tokens=target.prompts.shortest - 1,
        http_round_trip_s=tuple(target.round_trip_s),
        http_round_trip_path=target.round_trip_path,
        notes=target.notes,
        busy_before=round(busy) if busy is not None else None,
    )


async def explain_failure(target: Target, failed: Record, what: str, good: int) -> str:
    """One line on a request that failed, of which ``what`` names the place in the run, after ``good`` others."""
    gone = ", and the server is gone" if await target.is_gone(failed) else ""
    return f"{what} failed after {good} good one{'' if good == 1 else 's'}{gone}: {failed.error}"


async def foreign_tokens(target: Target, before: Scrape | None, sent: Sequence[Record]) -> int | None:
    """Tokens that the server's counter gained beyond those of this run; None where it has no such counter."""
    return beyond(before, await settled(target, before, sent), sent)


async def settled(target: Target, before: Scrape | None, sent: Sequence[Record]) -> Scrape | None:
    """What the server counts once it has counted all of this run; None where it does not count."""
    after = None
    for _ in range(SETTLES):
        after = await scrape(target.session, target.api) if before else None
        more = beyond(before, after, sent)
        if more is None or more >= 0:
            break
        await asyncio.sleep(SETTLE_S)
    return after


def beyond(before: Scrape | None, after: Scrape | None, sent: Sequence[Record]) -> int | None:
    """Tokens generated between two scrapes beyond those of the records; None without counters that went on."""
    gained = _gained(before, after, GENERATED)
    return round(gained) - sum(record.completion_tokens or 0 for record in sent) if gained is not None else None


def server_counts(before: Scrape | None, after: Scrape | None) -> ServerCounts | None:
    """What the server's counters gained between two scrapes."""
    generated, uncached = _gained(before, after, GENERATED), _gained(before, after, PROMPTED_UNCACHED)
    prompted = _gained(before, after, PROMPTED) if uncached is None else uncached
    if generated is None:
        return None
    return ServerCounts(
        generation_tokens=round(generated),
        prompt_tokens=round(prompted) if prompted is not None else None,
        cached_left_out=uncached is not None,
        ttft_s=_latencies(before, after, TTFT),
        itl_s=_latencies(before, after, ITL),
    )


def _latencies(before: Scrape | None, after: Scrape | None, names: Sequence[str]) -> tuple[float, int] | None:
    seconds = _gained(before, after, [f"{name}_sum" for name in names])
    number = _gained(before, after, [f"{name}_count" for name in names])
    return (seconds, round(number)) if seconds is not None and number else None


def _gained(before: Scrape | None, after: Scrape | None, names: Sequence[str]) -> float | None:
    start = before.value(names) if before else None
    end = after.value(names) if after else None
    return end - start if start is not None and end is not None and end >= start else None
