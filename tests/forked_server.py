"""Servers of the tests, each in a process of its own that is forked from one which has imported what they need.

A new interpreter with its imports takes 0.1 s, on a busy machine 0.3 s, and the tests start some 300 of them.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import ModuleType

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.scripted_server", "tests.law_server", "tests.slot_server"])

MakeServer = Callable[[str], ThreadingHTTPServer]
"""From a script, as JSON, to a server that is bound; called in the new process."""


@contextmanager
def forked(make: MakeServer, script: bytes) -> Iterator[str]:
    """Address of ``make(script)``, a function of a module, which serves for the length of the block."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(make, script.decode(), theirs), daemon=True)
    with _no_program():
        process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        if process.is_alive():  # its number may be another's by now if it has ended by itself
            process.kill()
        process.join()
        ours.close()


@contextmanager
def _no_program() -> Iterator[None]:
    """A new process would import the program that starts it, as of ``bench/``: a second, and a heap to walk."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _serve(make: MakeServer, script: str, announce: Connection) -> None:
    with make(script) as server:
        server.daemon_threads = True
        announce.send(server.server_address[1])
        threading.Thread(target=_end_with, args=(announce,), daemon=True).start()
        server.serve_forever()


def _end_with(other: Connection) -> None:
    """End this process when the one at the other end of a pipe does, whatever ended it."""
    with suppress(EOFError, OSError):
        other.recv()
    os._exit(0)
