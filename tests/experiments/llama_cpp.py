"""A real llama.cpp server from the wheel xllamacpp, on a free port, for as long as a test needs it."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from biphase.models import DEFAULT_MODEL, locate

SERVER = """
import json, sys, xllamacpp
asked, params = json.loads(sys.argv[1]), xllamacpp.CommonParams()
params.model.path, params.port = asked["model"], asked["port"]
params.n_parallel, params.n_ctx, params.endpoint_metrics = asked["slots"], asked["context"], True
if asked["batch"]:
    params.n_batch = params.n_ubatch = asked["batch"]
params.hostnames = ["127.0.0.1"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
server = xllamacpp.Server(params)
sys.stdin.read()
"""


@contextmanager
def llama_cpp_server(slots: int = 2, context: int = 2048, batch: int | None = None, threads: int = 2) -> Iterator[str]:
    """Its URL; the test is skipped where the wheel is not to be had. ``batch`` is n_batch and n_ubatch."""
    pytest.importorskip("xllamacpp", reason="the wheel xllamacpp is for x86-64 Linux")
    port = _free_port()
    asked = {"model": str(locate(DEFAULT_MODEL)), "port": port, "slots": slots, "context": context}
    command = [sys.executable, "-c", SERVER, json.dumps(asked | {"batch": batch, "threads": threads})]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_until_healthy(url := f"http://127.0.0.1:{port}", process)
            yield url
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail("the llama.cpp server did not start")
