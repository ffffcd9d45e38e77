"""The engine's own process: ``python -m biphase.engine.process FD OPTIONS`` over one end of a socket pair.

It ends when the other side closes the socket, so it never outlives its server, whatever ends that.
"""

import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from biphase.engine.messages import (
    HEADER,
    Abort,
    Fatal,
    Step,
    Submit,
    SubmitAll,
    ToEngine,
    ToServer,
    decode_to_engine,
    pack,
)
from biphase.engine.options import EngineOptions
from biphase.errors import BiphaseError

if TYPE_CHECKING:
    from biphase.engine.engine import Engine

PREPARED_SECONDS = 0.01
"""How often an engine without a step to run looks whether the grammar that it compiles is ready."""


WATCH_SECONDS = 0.25
"""How often an engine that loads looks whether its server is still there."""
REST_SECONDS = 0.5
"""Without a message for so long, the engine does what requests would otherwise wait for."""


class Connection:
    """Frames over a socket; reading never blocks while there is work to do."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, message: ToServer) -> None:
        self._sock.sendall(pack(message))

    def receive(self, patience: float | None) -> list[ToEngine]:
        """The messages that come within ``patience`` seconds; None waits for one.

        Raises ``EOFError`` when the server has gone.
        """
        while True:
            if select.select([self._sock], [], [], patience)[0]:
                data = self._sock.recv(1 << 20)
                if not data:
                    raise EOFError
                self._buffer += data
            messages = list(self._frames())
            if messages or patience is not None:
                return messages

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the process when the other side closes meanwhile: loading and compiling look at no message."""
        done = threading.Event()
        threading.Thread(target=self._end_with_the_other_side, args=(done,), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _end_with_the_other_side(self, done: threading.Event) -> None:
        hung_up = select.poll()
        hung_up.register(self._sock, 0)  # of no event, so only that the other side is gone
        while not done.wait(WATCH_SECONDS):
            if hung_up.poll(0):
                from biphase.engine.kernels import remove_temporary_code  # not above: before numba OpenMP is told

                remove_temporary_code()
                os._exit(0)

    @property
    def has_news(self) -> bool:
        """Whether something has come that ``receive`` has not seen, if only the end."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def _frames(self) -> Iterator[ToEngine]:
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + size
            if len(self._buffer) < end:
                break
            yield decode_to_engine(self._buffer[start + HEADER.size : end])
            start = end
        del self._buffer[:start]


def spin_briefly() -> None:
    """Let OpenMP's threads wait for each other awake for a moment only, then asleep; call before torch is loaded.

    By default they spin for milliseconds and hold the processor that the slower one needs as soon as anything else
    runs on this machine: beside two busy processes on two cores a decode step took 520 ms. Sleeping at once (45 ms
    there) costs a wake-up at each of the hundreds of barriers of a step when nothing else runs. In between, about
    0.2 ms, the gap between two operators is bridged awake and a lost processor is given up: 60 ms there.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # iterations; GNU's OpenMP, which torch for Linux carries
    os.environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds; LLVM's, on macOS


def main(fd: int, options: EngineOptions) -> None:
    """Load, report, and run steps until the server closes the socket."""
    spin_briefly()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it ends its requests, then closes the socket
    connection = Connection(socket.socket(fileno=fd))
    try:
        serve(connection, options)
    except (EOFError, ConnectionError):
        return
    except BiphaseError as error:
        connection.send(Fatal(str(error), error.exit_code))
    except Exception as error:
        # Whatever it is, the server's clients get a line; the traceback is for whoever asks for it.
        connection.send(Fatal(_one_line(error), 1))
        if os.environ.get("BIPHASE_TRACEBACK"):
            raise


def _one_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "not enough memory for the model and its KV cache; a smaller cache: --kv-cache-gb"
    return f"the engine failed: {type(error).__name__}: {text} (BIPHASE_TRACEBACK=1 shows where)"


def serve(connection: Connection, options: EngineOptions) -> None:
    """The step loop; idle it waits on the socket without using the processor."""
    gc.disable()  # it would walk over all that imports make, again and again
    from biphase.engine.build import build  # takes a second: only here

    with connection.watched():
        engine, ready = build(options, lambda text: print(text, file=sys.stderr, flush=True))
    gc.freeze()  # what is here now stays: no collection while steps run looks at it
    gc.enable()
    connection.send(ready)
    try:
        while True:
            run_once(connection, engine)
    finally:
        engine.close()


def run_once(connection: Connection, engine: "Engine") -> None:
    """Take what has come, and run a step where there is something to run."""
    messages = connection.receive(patience(engine))
    refusals = [take(engine, message) for message in messages]
    for refusal in (*refusals, *engine.take_prepared()):
        if refusal is not None:
            connection.send(refusal)
    if engine.has_work:
        connection.send(engine.step())
    elif not messages and not engine.preparing:
        rest(connection, engine)


def rest(connection: Connection, engine: "Engine") -> None:
    """Read the vocabulary and touch memory, until that is done or a message comes."""
    engine.read_vocabulary()
    while not connection.has_news and engine.touch_ahead():
        pass


def patience(engine: "Engine") -> float | None:
    """How many seconds the engine waits for a message before it does something else; None is for ever."""
    if engine.has_work:
        return 0.0
    if engine.preparing:
        return PREPARED_SECONDS
    return REST_SECONDS if engine.has_chores else None


def take(engine: "Engine", message: ToEngine) -> Step | None:
    """Do what the server asks; a step that says why, when that is a request that cannot run."""
    if isinstance(message, Submit):
        return engine.submit(message)
    if isinstance(message, SubmitAll):
        return engine.submit_all(message.submits)
    if isinstance(message, Abort):
        engine.abort(message.id)
    else:
        engine.learn(message)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineOptions))
