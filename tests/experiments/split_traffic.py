"""Traffic on a server while its split is watched: the client's own records beside what the server counted."""

import asyncio
from collections.abc import Iterable, Sequence

from biphase.analysis.latency import ttft
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.client.load import closed_loop, patient
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Call, make_call
from biphase.client.record import Record
from biphase.experiments.split import Origin, SplitPlan, SplitResult, measure

ENDLESS = SplitPlan(None, 0.1)
SETTLE_S = 0.3  # engines count a request a moment after its last byte


async def _send(target: Target, shapes: Sequence[tuple[int, int]], concurrency: int) -> list[Record]:
    """Requests of (prompt tokens, tokens to generate), so many at a time."""

    def calls() -> Iterable[Call]:
        for number, (length, tokens) in enumerate(shapes):
            prompt = target.prompts.make(length)
            yield make_call(target.dialect, f"r{number}", prompt.content, length, tokens)

    async def send(call: Call) -> Record:
        return await target.counted(await patient(target.session, call))

    return [record async for record in closed_loop(calls(), send, concurrency)]


async def _watched(
    url: str, shapes: Sequence[tuple[int, int]], concurrency: int, access: Access
) -> tuple[SplitResult, list[Record]]:
    async with open_target(url, None, access) as target:
        await _send(target, [(16, 4)], 1)  # what compiles on first use does so before the window
        await asyncio.sleep(SETTLE_S)
        watching = asyncio.create_task(
            measure(url, access, ENDLESS, Origin("0"), lambda found, text: None, lambda watch: None)
        )
        await asyncio.sleep(SETTLE_S)
        records = await _send(target, shapes, concurrency)
        await asyncio.sleep(SETTLE_S)
        watching.cancel()
        return await watching, records


def watched_traffic(
    url: str, shapes: Sequence[tuple[int, int]], concurrency: int, access: Access | None = None
) -> tuple[SplitResult, list[Record]]:
    """The split of a window that holds exactly this traffic, and the client's records of it."""
    return clock.run(_watched(url, shapes, concurrency, access or Access(timeout_s=300)))


def client_seconds(records: Sequence[Record]) -> tuple[float, float]:
    """Request-seconds until the first tokens (queue and prefill), and from them to the last ones."""
    first = [(record, seconds) for record in records if (seconds := ttft(record)) is not None]
    decode = sum(record.token_chunks[-1].t - record.token_chunks[0].t for record, _ in first)
    return sum(seconds for _, seconds in first), decode
