"""Servers of the tests, each in a process of its own that is forked from one which has imported what they need.

A new interpreter with its imports takes 0.1 s, on a busy machine 0.3 s, and the tests start some 300 of them.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.scripted_server", "tests.law_server", "tests.slot_server"])

MakeServer = Callable[[str], ThreadingHTTPServer]
"""From a script, as JSON, to a server that is bound; called in the new process."""


@contextmanager
def forked(make: MakeServer, script: bytes) -> Iterator[str]:
    """Address of ``make(script)``, a function of a module, which serves for the length of the block."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(make, script.decode(), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(make: MakeServer, script: str, announce: Connection) -> None:
    with make(script) as server:
        server.daemon_threads = True
        announce.send(server.server_address[1])
        server.serve_forever()
