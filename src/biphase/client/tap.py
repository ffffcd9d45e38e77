"""Reads the body of a streamed response inside the transport's own callback, where the stamp belongs.

An HTTP client hands bytes over by waking the task that waits for them: one turn of the event loop later, behind
everything else that is ready. A ``Tap`` stands between the transport and aiohttp's protocol while a stream is read. It
takes the stamp when the transport brings bytes and keeps both; when nothing else arrives, aiohttp undoes the transfer
encoding and the body is passed on. The timer of the read is one a stream, not one a read: to set it anew for each chunk
costs as much as to parse it.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

import aiohttp

from biphase.client.clock import arrival_clock

READ_BYTES = 1 << 14
"""The most that one read takes. asyncio's other kind of protocol allocates 256 KiB for each read, which the C library
maps and unmaps each time: that alone took 18 of the 45 us that a chunk did."""
MOST_KEPT = 64
"""Reads that are kept before their body is passed on: 1 MiB of each stream at most."""

Receive = Callable[[float, float, bytes], bool]
"""Given the stamp, the longest that these bytes can have waited for it, and the bytes; True when the rest is not
wanted."""


class Tap(asyncio.BufferedProtocol):
    """``async with Tap(response, receive, timeout_s) as tap: await tap.ended``: as long as ``receive`` wants more.

    ``ended`` raises what aiohttp raises for a body that is cut, ``TimeoutError`` after ``timeout_s`` without a byte.
    """

    def __init__(self, response: aiohttp.ClientResponse, receive: Receive, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._content = response.content
        self._receive = receive
        self._timeout_s = timeout_s
        self._arrived = time.perf_counter()
        self._loop = loop
        self._clock = arrival_clock()
        connection = response.connection  # None: the whole body is here already
        self._handler = connection.protocol if connection is not None else None
        self._transport = connection.transport if connection is not None else None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._kept: list[tuple[float, float, bytes]] = []

    async def __aenter__(self) -> "Tap":
        # what came with the head has woken the task: these bytes are one turn of the loop older
        now = time.perf_counter()
        self._pass_on(now, now - self._clock.earliest_before)
        if self._transport is not None and self._handler is not None and not self.ended.done():
            self._handler.read_timeout = None
            self._handler.start_timeout()  # without a time it takes the timer off
            self._transport.set_protocol(self)
            self._watch()
        elif not self.ended.done():
            self.ended.set_result(None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._catch_up()
        self._let_go()
        if self.ended.done():
            self.ended.cancelled() or self.ended.exception()  # seen, also where nobody awaited it
        else:
            self.ended.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the transport."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the transport: stamp first."""
        now = self._arrived = time.perf_counter()
        self._kept.append((now, now - self._clock.earliest, bytes(self._buffer[:nbytes])))
        if len(self._kept) == 1:
            self._clock.put_off(now, self._catch_up)
        elif len(self._kept) >= MOST_KEPT:
            self._catch_up()

    def eof_received(self) -> None:
        """Called by the transport."""
        self._catch_up()
        if self._handler is not None:
            self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the transport: aiohttp knows whether the body was complete."""
        self._catch_up()
        assert self._handler is not None
        self._handler.connection_lost(exc)
        self._pass_on(time.perf_counter(), 0.0)
        if not self.ended.done():
            self._end()

    def pause_writing(self) -> None:
        """Called by the transport."""
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Called by the transport."""
        if self._handler is not None:
            self._handler.resume_writing()

    def _catch_up(self) -> None:
        """Let aiohttp read what is kept, also when the reader has enough: the connection is to be used again."""
        kept, self._kept = self._kept, []
        for now, waited, data in kept:
            assert self._handler is not None
            self._handler.data_received(data)
            self._pass_on(now, waited)

    def _pass_on(self, now: float, waited: float) -> None:
        """Give the body that is there to the reader, until it has enough or the body ends."""
        if self.ended.done():
            return
        try:
            body = self._content.read_nowait()
            enough = bool(body) and self._receive(now, waited, body)
        except Exception as error:
            self._end(error)
            return
        if enough or self._content.at_eof():
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        self._let_go()
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None and self._transport.get_protocol() is self:
            self._transport.set_protocol(self._handler)  # type: ignore[arg-type]  # it was there before

    def _watch(self) -> None:
        """Look again when the wait can have become too long."""
        if self._timeout_s is None:
            return
        left = self._arrived + self._timeout_s - time.perf_counter()
        if left > 0:
            self._timer = self._loop.call_later(left, self._watch)
            return
        self._catch_up()
        if not self.ended.done():
            self._end(TimeoutError("no byte within the time limit"))
