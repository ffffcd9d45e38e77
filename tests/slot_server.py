"""An OpenAI-compatible server with a fixed number of slots and a fixed service time, in a process of its own.

A request waits in a queue, first come first served, until a slot is free. In its slot it takes ``first_s`` to its first
token and ``gap_s`` to each further one. What a load does to it can be worked out by hand. Its clock is absolute: a slot
is taken over at the moment at which it became free by the law, not when a thread woke up.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tests.forked_server import forked


class Slots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``per_token_s`` is added to the first token for each prompt token that no earlier prompt began with, in blocks of
    ``block``. With ``queue`` requests waiting the next is answered with 429. After ``dies_after`` the process ends."""

    slots: int = 1
    first_s: float = 0.02
    gap_s: float = 0.01
    per_token_s: float = 0.0
    block: int = 16
    queue: int | None = None
    dies_after: int | None = None
    max_model_len: int | None = None
    fails: bool = False
    engine_seconds: bool = False


class State:
    """Which slot is free when, by the law; what prompts began with; engine-seconds of the phases."""

    def __init__(self, law: Slots) -> None:
        self.law = law
        self.lock = threading.Lock()
        self.free = [0.0] * law.slots
        self.ends: list[float] = []
        self.served = 0
        self.seen: set[tuple[int, ...]] = set()
        self.prefill_s = self.decode_s = 0.0
        self.generated = 0

    def admit(self, ids: list[int], tokens: int) -> tuple[float, int] | None:
        """When the service of a request begins, and how many of its tokens are cached; None: turned away."""
        law, now = self.law, time.perf_counter()
        with self.lock:
            self.served += 1
            if law.dies_after is not None and self.served > law.dies_after:
                os._exit(1)
            waiting = sum(end > now for end in self.ends) - law.slots
            if law.queue is not None and waiting >= law.queue:
                return None
            cached = self._cached(ids)
            slot = min(range(law.slots), key=lambda i: self.free[i])
            start = max(now, self.free[slot])
            prefill = law.first_s + law.per_token_s * (len(ids) - cached)
            self.free[slot] = start + prefill + law.gap_s * (tokens - 1)
            self.ends = [end for end in self.ends if end > now] + [self.free[slot]]
            self.prefill_s += prefill
            self.decode_s += law.gap_s * (tokens - 1)
            self.generated += tokens
        return start, cached

    def _cached(self, ids: list[int]) -> int:
        edges = range(self.law.block, len(ids), self.law.block)
        found = 0
        for edge in edges:
            head = tuple(ids[:edge])
            if head in self.seen and found == edge - self.law.block:
                found = edge
            self.seen.add(head)
        return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: State

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/v1/models":
            limit = {"max_model_len": state.law.max_model_len} if state.law.max_model_len else {}
            return self._reply(200, msgspec.json.encode({"data": [{"id": "slots", **limit}]}))
        if self.path == "/health":
            return self._reply(200, b"{}")
        if self.path == "/metrics" and state.law.engine_seconds:
            lines = (
                f'biphase:engine_seconds_total{{phase="prefill"}} {state.prefill_s}',
                f'biphase:engine_seconds_total{{phase="decode"}} {state.decode_s}',
                f"vllm:generation_tokens_total {state.generated}",
            )
            return self._reply(200, ("\n".join(lines) + "\n").encode(), "text/plain")
        return self._reply(404, b"{}")

    def do_POST(self) -> None:
        body: dict[str, Any] = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self._reply(404, b'{"error": {"message": "no such route"}}')
        probe = self.state.served < 1
        admitted = self.state.admit(body["prompt"], body["max_tokens"])
        if self.state.law.fails and not probe:
            return self._reply(500, b'{"error": {"message": "scripted failure"}}')
        if admitted is None:
            return self._reply(429, b'{"error": {"message": "queue full"}}')
        self._stream(body["prompt"], body["max_tokens"], *admitted)
        return None

    def _stream(self, ids: list[int], tokens: int, start: float, cached: int) -> None:
        law = self.state.law
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        first = start + law.first_s + law.per_token_s * (len(ids) - cached)
        for number in range(tokens):
            while (left := first + law.gap_s * number - time.perf_counter()) > 0:
                time.sleep(left)
            counts = {"prompt_tokens": len(ids), "completion_tokens": number + 1}
            usage = {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
            reason = "length" if number == tokens - 1 else None
            event = {"choices": [{"index": 0, "text": " w", "finish_reason": reason}], "usage": usage}
            data = b"data: %s\n\n" % msgspec.json.encode(event)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


class Server(ThreadingHTTPServer):
    """Takes many connections at once, as a load brings them."""

    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that go away, as the end of a load makes them."""


@contextmanager
def slot_server(**law: Any) -> Iterator[str]:
    """Address of a server that obeys ``Slots(**law)`` for the length of the block."""
    with forked(make_server, msgspec.json.encode(Slots(**law))) as url:
        yield url


def make_server(law: str) -> Server:
    """The server of this law."""
    sys.setswitchinterval(1e-4)
    handler = type("SlotHandler", (Handler,), {"state": State(msgspec.json.decode(law, type=Slots))})
    return Server(("127.0.0.1", 0), handler)
