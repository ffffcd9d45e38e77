"""The closed loop: how many requests are in flight, and what happens when nobody listens any more."""

import asyncio

import pytest

from biphase.client.load import closed_loop
from biphase.client.openai import Call
from biphase.client.record import Record


def call(number: int) -> Call:
    return Call(str(number), "http://h", b"", 1, 1, "text")


class Sender:
    """Answers each call after a moment and counts how many it holds at once."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.running = self.most = self.cancelled = 0
        self.fails_at = fails_at

    async def __call__(self, call: Call) -> Record:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if call.id == self.fails_at:
            raise ValueError(call.id)
        return Record(id=call.id, intended=0.0, sent=0.0)


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_every_call_is_sent_once_and_never_more_at_a_time(concurrency: int) -> None:
    async def main() -> tuple[list[str], Sender]:
        send = Sender()
        return [r.id async for r in closed_loop(map(call, range(12)), send, concurrency)], send

    ids, send = asyncio.run(main())
    assert sorted(ids, key=int) == [str(number) for number in range(12)]
    assert send.most == min(concurrency, 12)
    assert concurrency > 1 or ids == sorted(ids, key=int)


def test_calls_are_made_only_when_they_are_sent() -> None:
    """A prompt is drawn when its turn comes, so a run that breaks off has not drawn the rest."""
    made = []

    async def main() -> None:
        async for _ in closed_loop((made.append(n) or call(n) for n in range(100)), Sender()):  # type: ignore[func-returns-value]
            if len(made) >= 3:
                break

    asyncio.run(main())
    assert len(made) < 10


def test_what_is_in_flight_is_cancelled_when_nobody_listens() -> None:
    async def main() -> Sender:
        send = Sender()
        records = closed_loop(map(call, range(100)), send, 4)
        async for _ in records:
            break
        await records.aclose()  # type: ignore[attr-defined]
        return send

    send = asyncio.run(main())
    assert send.running == 0
    assert send.cancelled > 0


def test_a_failure_of_the_sender_reaches_the_listener() -> None:
    async def main() -> list[str]:
        return [record.id async for record in closed_loop(map(call, range(5)), Sender(fails_at="2"), 1)]

    with pytest.raises(ValueError, match="2"):
        asyncio.run(main())
