"""Starts the built-in server as a child process and ends it again, whatever happens to this one.

The child runs ``biphase serve MODEL --managed``: it prints one JSON line on stdout when it is ready, logs to stderr and
shuts down when its stdin ends, so that it does not outlive its parent even when that is killed. Nothing here imports
torch or the server itself.
"""

import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import msgspec

from biphase.errors import BadInput, RunFailed

START_LIMIT_S = 900.0  # a model of many GB from a slow disk
LOOK_EVERY_S = 0.5
CLOSE_LIMIT_S = 10.0
TERMINATE_LIMIT_S = 5.0

OnWait = Callable[[float], None]


class Ready(msgspec.Struct, frozen=True):
    """The line the child prints once it listens."""

    url: str
    model: str


class _Child:
    """The process, with both its outputs read so that it never blocks on them."""

    def __init__(self, command: Sequence[str]) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the child in order.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        self.log: deque[bytes] = deque(maxlen=50)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._log_reader = self._read(self.process.stderr, self.log.append)
        self._read(self.process.stdout, self.lines.put, lambda: self.lines.put(None))

    @staticmethod
    def _read(
        stream: IO[bytes], take: Callable[[bytes], None], at_end: Callable[[], None] = lambda: None
    ) -> threading.Thread:
        def read() -> None:
            for line in stream:
                take(line)
            at_end()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def last_words(self) -> str:
        """The child's own error line without its prefix, else the last line of its log."""
        self._log_reader.join(timeout=1.0)
        lines = [line.decode("utf-8", "replace").strip() for line in self.log]
        own = [line.removeprefix("biphase: ") for line in lines if line.startswith("biphase: ")]
        return (own or [line for line in lines if line] or ["it said nothing"])[-1]

    def stop(self) -> None:
        """End the child: by closing its stdin, then by SIGTERM, then by SIGKILL, each with its time."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
            for limit, next_step in ((CLOSE_LIMIT_S, self.process.terminate), (TERMINATE_LIMIT_S, self.process.kill)):
                if self._ended_within(limit):
                    return
                next_step()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()

    def _ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True)
class ServerProcess:
    """A running built-in server."""

    url: str
    model: str
    _child: _Child

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.process.pid

    def death(self) -> str | None:
        """One line about how the server ended, or None while it runs."""
        status = self._child.process.poll()
        if status is None:
            return None
        if status < 0:
            return f"the built-in engine was killed by signal {-status}"
        return f"the built-in engine ended (status {status}): {self._child.last_words()}"


@contextmanager
def managed_server(model: str, *options: str, on_wait: OnWait = lambda seconds: None) -> Iterator[ServerProcess]:
    """Run ``biphase serve`` on a free loopback port for the length of the block.

    ``on_wait`` is told the seconds since the start while the model loads. A child that does not start raises what it
    said, as ``BadInput`` or ``RunFailed``; a ``RunFailed`` out of the block becomes the child's death if it has died.
    """
    serve = [sys.executable, "-m", "biphase", "serve", model, "--host", "127.0.0.1", "--port", "0", "--managed"]
    child = _Child([*serve, *options])
    try:
        ready = _wait_until_ready(child, on_wait)
        server = ServerProcess(ready.url, ready.model, child)
        try:
            yield server
        except RunFailed as error:
            if (death := server.death()) is not None:
                raise RunFailed(death) from error
            raise
    finally:
        child.stop()


def _wait_until_ready(child: _Child, on_wait: OnWait) -> Ready:
    began = time.monotonic()
    while (waited := time.monotonic() - began) < START_LIMIT_S:
        on_wait(waited)
        try:
            line = child.lines.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            continue
        if line is None:
            raise _start_failure(child)
        try:
            return msgspec.json.decode(line, type=Ready)
        except msgspec.MsgspecError:
            raise RunFailed(f"the built-in engine said something unexpected when it started: {line[:200]!r}") from None
    raise RunFailed(f"the built-in engine was not ready after {START_LIMIT_S:.0f} s")


def _start_failure(child: _Child) -> BadInput | RunFailed:
    status = child.process.wait(timeout=CLOSE_LIMIT_S)
    return BadInput(child.last_words()) if status == BadInput.exit_code else RunFailed(child.last_words())
