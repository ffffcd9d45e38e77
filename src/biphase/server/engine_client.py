"""The server's end of the engine: its process, the socket to it, and one queue of outputs for each request.

A request ends in one way only: with an ``Output`` that has a finish reason. When the engine's process dies or the
server shuts down, that output is made here, so whoever waits is always told.
"""

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from biphase.engine.messages import (
    HEADER,
    Abort,
    Fatal,
    Output,
    Ready,
    Step,
    Submit,
    SubmitAll,
    ToEngine,
    Vocabulary,
    decode_to_server,
    pack,
)
from biphase.errors import BadInput, BiphaseError, RunFailed
from biphase.scheduling.request import FinishReason
from biphase.server.metrics import Metrics
from biphase.server.starting import EngineProcess
from biphase.server.timeline import Timeline

EXIT_SECONDS = 2.0
"""How long the engine's process may take to end once its socket is closed."""


class RequestOutputs:
    """The outputs of requests that belong together, in the order in which they come.

    Leaving its ``with`` block aborts those that have not ended. An output is counted when it is taken, at the time at
    which it came: a step that still ran after the answer was complete gives tokens that nobody gets, and none counts.
    """

    def __init__(self, client: "EngineClient", submits: Sequence[Submit], choices_per_prompt: int) -> None:
        now = time.monotonic()
        self.timelines = {submit.id: Timeline.of(submit, now) for submit in submits}
        self._arrived: asyncio.Queue[tuple[Output, float]] = asyncio.Queue()
        self._client, self._choices_per_prompt = client, choices_per_prompt

    async def next(self) -> Output:
        """The next output of a request whose answer is not complete."""
        while True:
            output, at = await self._arrived.get()
            if self.timelines[output.id].reason is None:
                self._client.count(self.timelines[output.id], output, at)
                return output

    def arrive(self, output: Output, at: float) -> None:
        """Give an output to whoever awaits the next one; ``at`` is in seconds of ``time.monotonic``."""
        self._arrived.put_nowait((output, at))

    def finish(self, request_id: str, reason: str) -> None:
        """The answer is complete, for the engine's reason or because a stop string matched: it needs no more tokens."""
        self.timelines[request_id].reason = reason
        self._client.abort(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for request_id in self.timelines:
            self._client.abort(request_id)
        self._count_untaken()
        self._client.account(list(self.timelines.values()), self._choices_per_prompt)

    def _count_untaken(self) -> None:
        """What was made for a client that has left."""
        while not self._arrived.empty():
            output, at = self._arrived.get_nowait()
            if self.timelines[output.id].reason is None:
                self._client.count(self.timelines[output.id], output, at)


class EngineClient:
    """Talks to one engine's process. ``ready`` and ``died`` are futures; await ``ready`` before the first submit."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        metrics: Metrics,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.died: asyncio.Future[BiphaseError] = loop.create_future()
        self.closing = self.draining = False
        self._process, self._writer, self._metrics = process, writer, metrics
        self._open: dict[str, RequestOutputs] = {}
        self._beat = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, engine: EngineProcess, metrics: Metrics) -> "EngineClient":
        """Read the frames of a process that was started; it tells on ``ready`` how loading went."""
        return cls(engine.process, *await asyncio.open_unix_connection(sock=engine.sock), metrics)

    @property
    def alive(self) -> bool:
        return self.ready.done() and not self.died.done()

    @property
    def stalled_seconds(self) -> float:
        """How long the engine has had work and has ended no step; 0 without work."""
        return time.monotonic() - self._beat if self._open else 0.0

    async def drain(self) -> None:
        """Return once no request is open; the server takes none meanwhile."""
        self.draining = True
        await self._idle.wait()

    def submit(self, submits: Sequence[Submit], choices_per_prompt: int = 1) -> RequestOutputs:
        """Queue requests in the engine; use the result in a ``with`` block."""
        outputs = RequestOutputs(self, submits, choices_per_prompt)
        if not self._open:
            self._beat = time.monotonic()
        self._idle.clear()
        self._open.update((submit.id, outputs) for submit in submits)
        if self.closing or self.died.done():
            for submit in submits:
                self._end(submit.id, *self._ending())
        else:
            self._send(submits[0] if len(submits) == 1 else SubmitAll(tuple(submits)))
        return outputs

    def teach(self, vocabulary: Vocabulary) -> None:
        """Give the engine the model's tokens, which it needs for grammars."""
        self._send(vocabulary)

    def abort(self, request_id: str) -> None:
        """Forget a request and free it in the engine, in whatever state it is; one that has ended is left alone."""
        if self._open.pop(request_id, None) is not None:
            self._send(Abort(request_id))
            self._rest_if_idle()

    def account(self, timelines: Sequence[Timeline], choices_per_prompt: int) -> None:
        """Count requests that are over, in the order in which they were submitted."""
        taken = [timeline for timeline in timelines if timeline.refused is None]
        for timeline in taken:
            self._metrics.ended(timeline)
        for first in range(0, len(taken), choices_per_prompt):
            tokens = [timeline.tokens for timeline in taken[first : first + choices_per_prompt]]
            self._metrics.longest_outputs.observe(max(tokens))
        if taken:
            self._metrics.params_n.observe(choices_per_prompt)

    def end_all(self) -> None:
        """Take no request from here on, and end those that are open: their clients get a last output."""
        self.closing = True
        for request_id in list(self._open):
            self._send(Abort(request_id))
            self._end(request_id, *self._ending())

    async def close(self) -> None:
        """Close the socket, on which the process ends by itself; one that does not, or is still loading, is killed."""
        self.closing = True
        self._reading.cancel()
        self._writer.close()
        if not self.ready.done():
            self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, message: ToEngine) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            async for frame in _frames(reader):
                self._take(decode_to_server(frame))
        if not self.died.done():
            self._die(RunFailed(f"the engine's process {await self._how_it_ended()}"))

    def _take(self, message: Ready | Fatal | Step) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Ready):
            self._metrics.describe(message)
            self.ready.set_result(message)
        else:
            kind = BadInput if message.exit_code == BadInput.exit_code else RunFailed
            self._die(kind(message.message))

    def _deliver(self, step: Step) -> None:
        self._beat = time.monotonic()
        for output in step.outputs:
            outputs = self._open.get(output.id)
            if outputs is not None:  # else it was aborted while the step ran
                outputs.arrive(output, self._beat)
                if output.finish_reason is not None:
                    del self._open[output.id]
        self._metrics.step(step)
        self._rest_if_idle()

    def count(self, timeline: Timeline, output: Output, at: float) -> None:
        """Count an output of a request that arrived ``at`` this time."""
        timeline.note_first(output)
        if output.tokens:
            self._metrics.output(timeline, output, at)
            timeline.note(output, at)
        if output.error_code is not None:
            timeline.refused = output.error_code
            self._metrics.refused[output.error_code].inc()
        elif output.finish_reason == FinishReason.ERROR:
            timeline.failed = True

    def _rest_if_idle(self) -> None:
        """The engine sends no step when its last request was aborted, so its gauges are brought to rest here."""
        if not self._open:
            self._metrics.rest()
            self._idle.set()

    async def _how_it_ended(self) -> str:
        """For a socket that closed without a word."""
        try:
            status = await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status >= 0:
            return f"ended with exit status {status}"
        hint = " (the system may have run out of memory)" if -status == signal.SIGKILL else ""
        return f"was killed by signal {-status}{hint}"

    def _die(self, error: BiphaseError) -> None:
        self.died.set_result(error)
        if not self.ready.done():
            self.ready.set_exception(error)
        for request_id in list(self._open):
            self._end(request_id, *self._ending())

    def _ending(self) -> tuple[FinishReason, str]:
        if self.died.done():
            return FinishReason.ERROR, str(self.died.result())
        return FinishReason.ABORT, "the server is shutting down"

    def _end(self, request_id: str, reason: FinishReason, message: str) -> None:
        outputs = self._open.pop(request_id)
        outputs.arrive(Output(request_id, (), reason.value, message), time.monotonic())
        self._rest_if_idle()


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        yield await reader.readexactly(size)
