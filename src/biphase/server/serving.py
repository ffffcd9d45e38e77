"""Runs the server from start to clean end: the socket, the engine's process, HTTP, and what may end them."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop

from biphase.engine.messages import Ready
from biphase.engine.options import EngineOptions
from biphase.engine.text import Text, load_text
from biphase.errors import BadInput, RunFailed
from biphase.server.admission import ServedModel
from biphase.server.app import Service, build_app
from biphase.server.engine_client import ENGINE_COMMAND, EngineClient
from biphase.server.metrics import Metrics

GRACE_SECONDS = 3
"""How long streams may take to hand over their last chunk once the server ends."""

INTERRUPTED, ENDED = 130, 0
"""Exit status after Ctrl-C, and after SIGTERM or the end of stdin."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """``engine_options`` goes to the engine's process; ``path`` is where the model lies, for the tokenizer."""

    model_name: str
    path: Path
    sock: socket.socket
    engine_options: EngineOptions
    end_with_stdin: bool = False
    engine_command: Sequence[str] = ENGINE_COMMAND


@dataclass(frozen=True, slots=True)
class Started:
    """What is known once the server answers."""

    url: str
    model: ServedModel
    ready: Ready


def bind(host: str, port: int) -> socket.socket:
    """A socket bound before anything is loaded; ``RunFailed`` when the port is taken.

    It does not listen yet, so that clients are turned away, not kept waiting, while the model loads.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (OSError, UnicodeError) as error:
        raise BadInput(f"--host {host}: no such address: {error}") from error
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise RunFailed(_bind_problem(host, port, error)) from error
    return sock


def _listen(sock: socket.socket) -> None:
    """Of two sockets that are bound to one port and do not listen, the second to listen fails here."""
    try:
        sock.listen(2048)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise RunFailed(_bind_problem(host, port, error)) from error


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; give another with --port, or --port 0 for a free one"
    return f"cannot listen on {host} port {port}: {error.strerror}"


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
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _end_on_signals(stop)
    if settings.end_with_stdin:
        _end_with_stdin(stop)
    metrics = Metrics(settings.model_name)
    engine = await EngineClient.start(settings.engine_options, metrics, settings.engine_command)
    try:
        text = await asyncio.to_thread(load_text, settings.path)
        await asyncio.wait((engine.ready, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return stop.result()
        model = _served_model(settings.model_name, text, engine.ready.result())
        return await _serve_http(settings, Service(model, engine, metrics, int(time.time())), stop, announce)
    finally:
        await engine.close()


def _served_model(name: str, text: Text, ready: Ready) -> ServedModel:
    return ServedModel(name, text, ready.max_model_len, ready.vocab_size)


async def _serve_http(
    settings: ServeSettings, service: Service, stop: asyncio.Future[int], announce: Callable[[Started], None]
) -> int:
    _listen(settings.sock)
    server = _Server(_uvicorn_config(service))
    serving = asyncio.create_task(server.serve([settings.sock]))
    await asyncio.wait((server.listening, serving), return_when=asyncio.FIRST_COMPLETED)
    announce(Started(url_of(settings.sock), service.model, service.engine.ready.result()))
    await asyncio.wait((stop, service.engine.died, serving), return_when=asyncio.FIRST_COMPLETED)
    service.engine.end_all()
    server.should_exit = True
    await serving
    if not stop.done() and service.engine.died.done():
        raise service.engine.died.result()
    return stop.result() if stop.done() else ENDED


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
        build_app(service),
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=75,  # longer than the idle pools of common clients, so that none meets a closing connection
    )


def _end_on_signals(stop: asyncio.Future[int]) -> None:
    loop = asyncio.get_running_loop()
    for number, status in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, ENDED)):
        loop.add_signal_handler(number, _resolve, stop, status)


def _end_with_stdin(stop: asyncio.Future[int]) -> None:
    """End when whoever started the server closes its stdin, by will or by dying. A thread, for stdin may be a file."""
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has closed before
            loop.call_soon_threadsafe(_resolve, stop, ENDED)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _resolve(stop: asyncio.Future[int], status: int) -> None:
    if not stop.done():
        stop.set_result(status)
