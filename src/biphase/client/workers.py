"""Client processes that send for this one: reading many streams takes more than one core.

A worker is ``python -m biphase.client.workers``. It gets its access and then calls on stdin and gives records on
stdout, each a msgpack message behind its length in four bytes. All processes of a machine share the clock of
``time.perf_counter``, so the stamps need no translation.
"""

import asyncio
import os
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from biphase.client import clock
from biphase.client.endpoint import Access, connect
from biphase.client.openai import Call, request
from biphase.client.record import Record
from biphase.errors import RunFailed

SendCall = Callable[[Call, float | None], Awaitable[Record]]
"""Sends a call that was due at a moment of ``time.perf_counter``; None: it is due now."""

LENGTH = struct.Struct("<I")
END_LIMIT_S = 3.0


class Entry(msgspec.Struct, frozen=True):
    """What a worker must know to talk to the server."""

    headers: dict[str, str]
    timeout_s: float
    ca: str | None


class Job(msgspec.Struct, frozen=True):
    """A call to send now; ``call`` None gives up the one of that number."""

    number: int
    call: Call | None
    intended: float | None = None


class Done(msgspec.Struct, frozen=True):
    """What became of it."""

    number: int
    record: Record


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
    except asyncio.IncompleteReadError:
        return None


def _framed(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


class _Worker:
    """One process, and who waits for what it was given."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._waiting: dict[int, asyncio.Future[Record]] = {}
        self._count = 0
        self._ended = False
        self._listening = asyncio.create_task(self._listen())

    async def send(self, call: Call, intended: float | None) -> Record:
        """The record of a call; cancelled, the call is given up there too."""
        if self._ended:
            raise RunFailed("a client process ended before its time")
        self._count += 1
        number = self._count
        answer: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._stdin.write(_framed(Job(number, call, intended)))
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._ended:
                self._stdin.write(_framed(Job(number, None)))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Done)
        while (message := await _read(self._stdout)) is not None:
            done = decoder.decode(message)
            if (answer := self._waiting.get(done.number)) is not None and not answer.done():
                answer.set_result(done.record)
        self._ended = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RunFailed("a client process ended before its time"))

    async def end(self) -> None:
        """Close its stdin, then its life."""
        with suppress(OSError):
            self._stdin.close()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        self._listening.cancel()


@asynccontextmanager
async def worker_pool(count: int, access: Access) -> AsyncIterator[SendCall]:
    """``count`` processes that take calls in turn, for the length of the block. ``RunFailed`` when one dies."""
    entry = Entry(dict(access.headers), access.timeout_s, str(access.ca) if access.ca else None)
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(await _start(entry))
        yield _in_turn(workers)
    finally:
        await asyncio.gather(*(worker.end() for worker in workers))


async def _start(entry: Entry) -> _Worker:
    # a session of its own: Ctrl-C is for this process, which ends its workers in order
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "biphase.client.workers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        limit=1 << 24,
    )
    assert process.stdin is not None
    process.stdin.write(_framed(entry))
    assert process.stdout is not None
    if await process.stdout.read(1) == b"":
        raise RunFailed("a client process did not start")
    return _Worker(process)


def _in_turn(workers: Sequence[_Worker]) -> SendCall:
    turn = 0

    async def send(call: Call, intended: float | None) -> Record:
        nonlocal turn
        turn = (turn + 1) % len(workers)
        return await workers[turn].send(call, intended)

    return send


async def work(stdin: int, stdout: int) -> None:
    """A worker's life: until its stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdin, "rb", buffering=0))
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(stdout, "wb", buffering=0))
    entry = msgspec.msgpack.decode(await _read(reader) or b"", type=Entry)
    access = Access(entry.headers, entry.timeout_s, Path(entry.ca) if entry.ca else None)
    async with connect(access) as session:
        transport.write(b"+")
        running: dict[int, asyncio.Task[None]] = {}

        async def serve(number: int, call: Call, intended: float | None) -> None:
            answer = await request(session, call, intended)
            transport.write(_framed(Done(number, answer.record)))

        while (message := await _read(reader)) is not None:
            job = msgspec.msgpack.decode(message, type=Job)
            if job.call is None:
                if (given_up := running.get(job.number)) is not None:
                    given_up.cancel()
                continue
            task = asyncio.create_task(serve(job.number, job.call, job.intended))
            running[job.number] = task
            task.add_done_callback(lambda _, number=job.number: running.pop(number, None))  # type: ignore[misc]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        clock.run(work(os.dup(sys.stdin.fileno()), os.dup(sys.stdout.fileno())))
