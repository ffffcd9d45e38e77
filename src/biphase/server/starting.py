"""The first things of a start: the port, and the engine's process, which loads while the server imports what it needs.

Light on purpose: nothing here may import the server itself.
"""

import errno
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import msgspec

from biphase.engine.options import EngineOptions
from biphase.errors import BadInput, RunFailed

ENGINE_COMMAND = (sys.executable, "-m", "biphase.engine.process")
"""Called with two arguments more: the file descriptor of its end of the socket, and its options as JSON."""

STDERR = 2
"""The file descriptor; stdout is kept for the one line of a managed server."""


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
        raise RunFailed(bind_problem(host, port, error)) from error
    return sock


def bind_problem(host: str, port: int, error: OSError) -> str:
    """Why a port cannot be had, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; give another with --port, or --port 0 for a free one"
    return f"cannot listen on {host} port {port}: {error.strerror}"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine's process and the server's end of the socket to it; it ends when that is closed."""

    process: subprocess.Popen[bytes]
    sock: socket.socket


@contextmanager
def engine_process(options: EngineOptions, command: Sequence[str] = ENGINE_COMMAND) -> Iterator[EngineProcess]:
    """Start it in a process group of its own, so that Ctrl-C is the server's alone; it has ended on leaving.

    SIGTERM leaves at once until the server answers it by itself. What the engine prints goes to stderr.
    """
    ours, theirs = socket.socketpair()
    with theirs, _signals_put_off() as act_on_them:
        arguments = [*command, str(theirs.fileno()), msgspec.json.encode(options).decode()]
        process = subprocess.Popen(
            arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=STDERR, process_group=0
        )
    try:
        act_on_them()
        yield EngineProcess(process, ours)
    finally:
        ours.close()
        if process.poll() is None:
            process.terminate()
        process.wait()


@contextmanager
def _signals_put_off() -> Iterator[Callable[[], None]]:
    """Within, SIGINT and SIGTERM are only noted; what is given acts on those that came and ends the putting off.

    An exception out of a handler while ``Popen`` waits for its child would leave a child that nobody knows of.
    """
    noted: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    interrupt = signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)

    def act() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGINT, interrupt)
        for number in noted:
            signal.raise_signal(number)

    try:
        yield act
    except BaseException:
        act()
        raise
