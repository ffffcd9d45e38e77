"""A server that streams prebuilt chunks to many clients at an even pace and remembers the moment of each write.

    python bench/streaming_server.py [--gap-ms 10] [--first-ms 100] [--together]

It computes nothing: one process, raw sockets, one thread. Each request gets as many tokens as it asks for, the first
after ``first-ms``, then one every ``gap-ms``; with ``--together`` all streams have theirs at the same moments, as after
a step of an engine. ``GET /written`` gives, for each request, when it was read and when each
token was written (``time.perf_counter``, which all processes of a machine share). Prints its port.
"""

import argparse
import heapq
import math
import selectors
import socket
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

JSON_HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "bench", "max_model_len": 100000}]}'


def framed(data: bytes) -> bytes:
    """One event as a chunk of HTTP/1.1's chunked encoding."""
    event = b"data: %s\n\n" % data
    return b"%x\r\n%s\r\n" % (len(event), event)


@cache
def frames(chat: bool, tokens: int, running: bool) -> tuple[bytes, ...]:
    """What vLLM sends for each token, then for the end; ``running``: with running counts."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    made = []
    for number in range(1, tokens + 1):
        text: dict[str, Any] = {"delta": {"content": " word"}} if chat else {"text": " word"}
        reason = "length" if number == tokens else None
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": reason}
        counts = {"usage": _usage(number)} if running else {}
        made.append(framed(_body(kind, [choice], counts)))
    return (*made, framed(_body(kind, [], {"usage": _usage(tokens)})) + framed(b"[DONE]") + b"0\r\n\r\n")


def _usage(number: int) -> dict[str, int]:
    return {"prompt_tokens": 8, "total_tokens": 8 + number, "completion_tokens": number}


def _body(kind: str, choices: Sequence[object], more: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"id": "c-1", "object": kind, "created": 1, "model": "m", "choices": choices, **more})


class Stream:
    """One answer on its way: its frames, how many went out, and when. ``tag``: the prompt's first token id, if any."""

    def __init__(self, wire: socket.socket, body: dict[str, Any], chat: bool) -> None:
        options = body.get("stream_options") or {}
        tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        prompt = body.get("prompt")
        self.tag = prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], int) else None
        self.read = time.perf_counter()
        self.written: list[float] = []
        self.wire = wire
        self.frames = frames(chat, tokens, bool(options.get("continuous_usage_stats")))
        self._unsent = b""
        self._next = 0

    def write(self) -> bool:
        """Send the next token (with the last of them the end); False when the answer is whole or its reader is gone."""
        last = self._next == len(self.frames) - 2
        data = self._unsent + (b"".join(self.frames[-2:]) if last else self.frames[self._next])
        self.written.append(time.perf_counter())
        try:
            sent = self.wire.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        self._unsent = data[sent:]
        self._next += 1
        if last and self._unsent:  # a reader that is far behind: wait for it
            self.wire.setblocking(True)
            self.wire.sendall(self._unsent)
            self.wire.setblocking(False)
        return not last


class Server:
    """Reads requests and writes tokens when they are due."""

    def __init__(self, first_s: float, gap_s: float, together: bool = False) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listening.getsockname()[1]
        self._first_s, self._gap_s, self._together = first_s, gap_s, together
        self._ready = selectors.DefaultSelector()
        self._ready.register(self.listening, selectors.EVENT_READ)
        self._partial: dict[int, bytes] = {}
        self._due: list[tuple[float, int, Stream]] = []
        self._streams: list[Stream] = []

    def run(self) -> None:
        """For ever."""
        while True:
            wait = max(0.0, self._due[0][0] - time.perf_counter()) if self._due else None
            for key, _ in self._ready.select(wait):
                if key.fileobj is self.listening:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(key.fileobj)
            self._write_due()

    def _write_due(self) -> None:
        now = time.perf_counter()
        while self._due and self._due[0][0] <= now:
            due, number, stream = self._due[0]
            if stream.write():
                heapq.heapreplace(self._due, (due + self._gap_s, number, stream))
            else:
                heapq.heappop(self._due)

    def _accept(self) -> None:
        wire = self.listening.accept()[0]
        wire.setblocking(False)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._partial[wire.fileno()] = b""
        self._ready.register(wire, selectors.EVENT_READ)

    def _receive(self, wire: socket.socket) -> None:
        try:
            received = wire.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self._ready.unregister(wire)
            self._partial.pop(wire.fileno())
            wire.close()
            return
        whole = self._partial[wire.fileno()] + received
        head, complete, body = whole.partition(b"\r\n\r\n")
        length = _content_length(head)
        if not complete or len(body) < length:
            self._partial[wire.fileno()] = whole
            return
        self._partial[wire.fileno()] = b""
        self._answer(wire, head.split(b" ", 2)[:2], body)

    def _answer(self, wire: socket.socket, request: list[bytes], body: bytes) -> None:
        method, path = request
        if method == b"POST" and path.endswith(b"/completions"):
            wire.send(STREAM_HEAD)
            stream = Stream(wire, msgspec.json.decode(body), b"chat" in path)
            self._streams.append(stream)
            heapq.heappush(self._due, (self._first_due(stream.read), len(self._streams), stream))
            return
        status, content = 200, b"{}"
        if path == b"/written":
            content = msgspec.json.encode([(s.tag, s.read, s.written) for s in self._streams])
            self._streams = []
        elif path.endswith(b"/models"):
            content = MODELS
        elif not path.endswith(b"/health"):
            status = 404
        wire.setblocking(True)
        wire.sendall(JSON_HEAD % (status, len(content)) + content)
        wire.setblocking(False)

    def _first_due(self, read: float) -> float:
        due = read + self._first_s
        return math.ceil(due / self._gap_s) * self._gap_s if self._together else due


def _content_length(head: bytes) -> int:
    lines = (line.lower() for line in head.split(b"\r\n"))
    return next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)


def main() -> None:
    """Print the port and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--first-ms", type=float, default=100.0)
    parser.add_argument("--together", action="store_true", help="all streams at the same moments")
    options = parser.parse_args()
    server = Server(options.first_ms / 1e3, options.gap_ms / 1e3, options.together)
    print(server.port, flush=True)
    server.run()


if __name__ == "__main__":
    main()
