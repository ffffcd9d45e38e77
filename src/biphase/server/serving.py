"""Runs the server from start to clean end: the socket, the engine's process, HTTP, and what may end them."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import uvicorn
import uvloop

from biphase.engine.grammar import vocabulary_of
from biphase.engine.messages import Ready, Vocabulary
from biphase.engine.text import Text, load_text
from biphase.errors import RunFailed
from biphase.server.admission import ServedModel
from biphase.server.app import Service, build_app
from biphase.server.engine_client import EngineClient
from biphase.server.http import Ended, Protocol
from biphase.server.metrics import Metrics
from biphase.server.policy import Policy
from biphase.server.starting import EngineProcess, bind_problem

GRACE_SECONDS = 3
"""How long streams may take to hand over their last chunk once the server ends."""


class Ending(Enum):
    """What ends the server."""

    INTERRUPT = "SIGINT"
    TERMINATE = "SIGTERM"
    STDIN = "the end of stdin"

    @property
    def status(self) -> int:
        """The exit status: that of an interrupted program after Ctrl-C, else of one that did its work."""
        return 130 if self is Ending.INTERRUPT else 0


class Stop:
    """Whether the server is to end: ``first`` says by what, ``again`` that it is asked a second time, to hurry."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[Ending] = loop.create_future()
        self.again: asyncio.Future[None] = loop.create_future()

    def __call__(self, ending: Ending) -> None:
        if not self.first.done():
            self.first.set_result(ending)
        elif not self.again.done():
            self.again.set_result(None)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """``path`` is where the model lies, for the tokenizer; ``engine`` runs at most ``max_num_seqs`` requests at once.

    After SIGTERM running requests have ``drain_timeout`` seconds to finish.
    """

    model_name: str
    path: Path
    sock: socket.socket
    engine: EngineProcess
    max_num_seqs: int
    end_with_stdin: bool = False
    policy: Policy = field(default_factory=Policy)
    drain_timeout: float = 30.0


@dataclass(frozen=True, slots=True)
class Started:
    """What is known once the server answers."""

    url: str
    model: ServedModel
    ready: Ready
    max_num_seqs: int

    @property
    def pool_is_all(self) -> bool:
        """Whether the KV pool holds as many requests of full length as may run; a larger one would stay unused."""
        blocks = -(-self.ready.max_model_len // self.ready.block_size)
        return self.ready.num_blocks == blocks * self.max_num_seqs


def _listen(sock: socket.socket) -> None:
    """Of two sockets that are bound to one port and do not listen, the second to listen fails here."""
    try:
        sock.listen(2048)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise RunFailed(bind_problem(host, port, error)) from error


def url_of(sock: socket.socket) -> str:
    """The address under which a client on this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(settings: ServeSettings, announce: Callable[[Started], None]) -> int:
    """Serve until a signal, the end of stdin (if asked) or the engine's death; returns the exit status.

    ``announce`` is called once, when requests are answered. Raises ``BiphaseError`` when loading fails
    or the engine dies.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, announce))


async def _serve(settings: ServeSettings, announce: Callable[[Started], None]) -> int:
    stop = Stop()
    _end_on_signals(stop)
    if settings.end_with_stdin:
        _end_with_stdin(stop)
    metrics = Metrics(settings.model_name)
    engine = await EngineClient.connect(settings.engine, metrics)
    try:
        text, vocabulary = await asyncio.to_thread(_load_text, settings.path)
        await asyncio.wait((engine.ready, stop.first), return_when=asyncio.FIRST_COMPLETED)
        if stop.first.done():
            return stop.first.result().status
        if vocabulary is not None:
            engine.teach(vocabulary)
        model = _served_model(settings.model_name, text, engine.ready.result())
        service = Service(model, engine, metrics, int(time.time()), settings.policy)
        return await _serve_http(settings, service, stop, announce)
    finally:
        await engine.close()


def _load_text(path: Path) -> tuple[Text, Vocabulary | None]:
    text = load_text(path)
    return text, vocabulary_of(text)


def _served_model(name: str, text: Text, ready: Ready) -> ServedModel:
    return ServedModel(name, text, ready.max_model_len, ready.vocab_size)


async def _serve_http(
    settings: ServeSettings, service: Service, stop: Stop, announce: Callable[[Started], None]
) -> int:
    _listen(settings.sock)
    server = _Server(_uvicorn_config(service))
    serving = asyncio.create_task(server.serve([settings.sock]))
    await asyncio.wait((server.listening, serving), return_when=asyncio.FIRST_COMPLETED)
    gc.freeze()
    gc.enable()
    ready, most = service.engine.ready.result(), settings.max_num_seqs
    announce(Started(url_of(settings.sock), service.model, ready, most))
    await asyncio.wait((stop.first, service.engine.died, serving), return_when=asyncio.FIRST_COMPLETED)
    if stop.first.done() and stop.first.result() is Ending.TERMINATE:
        await _drain(service.engine, stop, settings.drain_timeout)
    service.engine.end_all()
    server.should_exit = True
    await serving
    if not stop.first.done() and service.engine.died.done():
        raise service.engine.died.result()
    return stop.first.result().status if stop.first.done() else 0


async def _drain(engine: EngineClient, stop: Stop, seconds: float) -> None:
    """Take no request, and wait until all have ended, the time is over, a second signal comes or the engine dies."""
    draining = asyncio.create_task(engine.drain())
    await asyncio.wait((draining, stop.again, engine.died), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would raise the signal again after a clean end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set_result(None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        Ended(build_app(service)),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=75,  # longer than the idle pools of common clients, so that none meets a closing connection
    )


def _end_on_signals(stop: Stop) -> None:
    loop = asyncio.get_running_loop()
    for number, ending in ((signal.SIGINT, Ending.INTERRUPT), (signal.SIGTERM, Ending.TERMINATE)):
        loop.add_signal_handler(number, stop, ending)


def _end_with_stdin(stop: Stop) -> None:
    """End when whoever started the server closes its stdin, by will or by dying. A thread, for stdin may be a file."""
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has closed before
            loop.call_soon_threadsafe(stop, Ending.STDIN)

    threading.Thread(target=wait_for_end, daemon=True).start()
