"""The facts of a run beside its records: versions, the server, and what it did for others meanwhile."""

import asyncio
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from biphase.client.negotiation import Target
from biphase.client.record import Record, RunFacts
from biphase.client.scrape import GENERATED, RUNNING, Scrape, scrape

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


async def foreign_tokens(target: Target, before: Scrape | None, sent: Sequence[Record]) -> int | None:
    """Tokens that the server's counter gained beyond those of this run; None where it has no such counter."""
    own = sum(record.completion_tokens or 0 for record in sent)
    start = before.value(GENERATED) if before else None
    if start is None:
        return None
    beyond = None
    for _ in range(SETTLES):
        after = await scrape(target.session, target.api)
        now = after.value(GENERATED) if after else None
        if now is None or now < start:  # gone, or the server began anew
            return None
        beyond = round(now - start) - own
        if beyond >= 0:
            break
        await asyncio.sleep(SETTLE_S)
    return beyond
