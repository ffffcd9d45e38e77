"""An OpenAI-compatible server whose phases obey known laws, with continuous batching, in a process of its own.

One thread is the engine: it prefills what waits, whole or in chunks, then runs a decode step for all that run, sleeps
until the moment at which the law says that the step ends, and writes the tokens. A prefill begins when the response's
head is sent.
"""

import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tests.forked_server import forked

SPIN_S = 3e-4  # before the end of a step: a sleep wakes late, by up to 0.2 ms
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Laws(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill ``a + b S + c S^2`` ms; a decode step ``t0 + w B + k sum(contexts)`` ms; ``chunk`` tokens a pass."""

    a: float = 30.0
    b: float = 0.1
    c: float = 2e-6
    t0: float = 8.0
    w: float = 0.5
    k: float = 1e-4
    chunk: int | None = None


class Job:
    """One request: what of its prompt is computed, what of its answer made, and where its tokens go.

    ``began``: the moment at which its head was sent, from which its prefill counts.
    """

    def __init__(self, prompt: int, tokens: int, wire: socket.socket) -> None:
        self.prompt, self.tokens = prompt, tokens
        self.computed = self.made = 0
        self.began = 0.0
        self.over = threading.Event()
        self._wire = wire
        self._frames = [frame(prompt, made, tokens) for made in range(1, tokens + 1)]

    def emit(self) -> None:
        try:
            self._wire.sendall(self._frames[self.made])
        except OSError:  # the client has gone: nothing more to compute
            self.tokens = self.made + 1
        self.made += 1
        if self.made >= self.tokens:
            self.over.set()


def frame(prompt: int, made: int, tokens: int) -> bytes:
    """The chunk of one token, as it goes over the wire."""
    usage = {"prompt_tokens": prompt, "completion_tokens": made}
    choice = {"index": 0, "text": " w", "finish_reason": "length" if made == tokens else None}
    data = b"data: %s\n\n" % msgspec.json.encode({"choices": [choice], "usage": usage})
    return b"%x\r\n%s\r\n" % (len(data), data)


class Engine(threading.Thread):
    """Runs steps whose lengths are those of the laws, measured from the end of the step before.

    It writes its tokens itself, at the moment at which the law says that the step ends: what threads and timers cost
    is no part of the law.
    """

    def __init__(self, laws: Laws) -> None:
        super().__init__(daemon=True)
        self.laws = laws
        self.arrived: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.generated = 0

    def run(self) -> None:
        end = time.perf_counter()
        while True:
            if not self.waiting and not self.running:
                self.waiting.append(self.arrived.get())
                end = max(end, self.waiting[0].began)
            while not self.arrived.empty():
                self.waiting.append(self.arrived.get())
            end += self._step_ms() / 1e3
            while (left := end - time.perf_counter()) > 0:
                if left > SPIN_S:
                    time.sleep(left - SPIN_S)
            self._finish_step()

    def _step_ms(self) -> float:
        laws, self.prefilling, self.decoding = self.laws, self.waiting[:1], list(self.running)
        if not self.waiting:
            return self._decode_ms()
        job, done = self.waiting[0], self.waiting[0].computed
        now = min(job.prompt, done + (laws.chunk or job.prompt))
        job.computed = now
        if laws.chunk is None:  # a whole prompt stops the others
            self.decoding = []
        beside = self._decode_ms() - laws.t0 if self.decoding else 0.0
        return laws.a + laws.b * (now - done) + laws.c * (now**2 - done**2) + beside

    def _decode_ms(self) -> float:
        contexts = sum(job.prompt + job.made for job in self.decoding)
        return self.laws.t0 + self.laws.w * len(self.decoding) + self.laws.k * contexts

    def _finish_step(self) -> None:
        for job in self.decoding:
            job.emit()
        for job in self.prefilling:
            if job.computed == job.prompt:
                self.waiting.remove(job)
                self.running.append(job)
                job.emit()
        self.generated += len(self.decoding) + sum(job.made == 1 for job in self.prefilling)
        self.running = [job for job in self.running if job.made < job.tokens]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/metrics":
            counts = (
                f"vllm:generation_tokens_total {engine.generated}\nvllm:num_requests_running {len(engine.running)}\n"
            )
            return self._reply(counts.encode(), "text/plain")
        if self.path == "/health":
            return self._reply(b"{}")
        listed = self.path == "/v1/models"
        return self._reply(b'{"data": [{"id": "laws"}]}' if listed else b"{}", status=200 if listed else 404)

    def do_POST(self) -> None:
        body: dict[str, Any] = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self._reply(b'{"error": {"message": "no such route"}}', status=404)
        job = Job(len(body["prompt"]), body["max_tokens"], self.connection)
        job.began = time.perf_counter()
        self.connection.sendall(STREAM_HEAD)
        self.engine.arrived.put(job)
        job.over.wait()
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return None


@contextmanager
def law_server(**laws: Any) -> Iterator[str]:
    """Address of a server that obeys ``Laws(**laws)`` for the length of the block."""
    with forked(make_server, msgspec.json.encode(Laws(**laws))) as url:
        yield url


def make_server(laws: str) -> ThreadingHTTPServer:
    """The server of these laws, whose engine runs."""
    sys.setswitchinterval(1e-4)  # a thread that writes must not hold the engine up for Python's usual 5 ms
    engine = Engine(msgspec.json.decode(laws, type=Laws))
    engine.start()
    return ThreadingHTTPServer(("127.0.0.1", 0), type("LawHandler", (Handler,), {"engine": engine}))
