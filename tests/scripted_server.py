"""An OpenAI-compatible server that does exactly what a script says, in a process of its own.

Its times are slept with absolute deadlines and a thread for each connection, so that a client can be held to them;
``/sent`` gives the moments (``time.perf_counter``, one clock for all processes of a machine) at which each chunk was
really written. Its tokens are words: a text of n words counts n tokens, a list of n ids too.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tests.forked_server import forked

FIRST_TOKEN_S = 0.080
GAP_S = 0.010
STALL_S = 0.300


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timings and oddities; the defaults are a well-behaved server."""

    first_token_s: float = FIRST_TOKEN_S
    gap_s: float = GAP_S
    stalls: dict[int, float] = msgspec.field(default_factory=dict)  # before which token (0-based) the gap is another
    per_token_s: float = 0.0  # added to the first token for each prompt token
    tokens_per_chunk: int = 1
    newline: str = "\n"
    comments: bool = False
    role_chunk: bool = True
    usage: str = "final"  # continuous, final, final_on_finish, null_then_final, none
    done: bool = True
    finish: bool = True
    cut_after: int | None = None  # chunks until the connection breaks
    error_after: int | None = None  # chunks until an error object comes
    stop_after: int | None = None  # tokens until EOS
    refuses: tuple[str, ...] = ()  # fields answered with 400
    refuses_ids: bool = False
    names_the_field: bool = True
    completions: bool = True
    chat: bool = True
    streams: bool = True
    models: tuple[str, ...] = ("scripted",)
    has_models: bool = True
    has_tokenize: bool = False
    status: int | None = None  # of every completion
    limited_requests: int = 0  # that many completions are answered with 429 and Retry-After: 0
    dies_after: int | None = None  # completions until the process ends
    silent: bool = False
    max_model_len: int | None = None
    n_vocab: int | None = None
    refuses_longer_than: int | None = None
    bos: int = 0
    template: int = 5
    cached: int | None = None
    api_key: str | None = None
    prefix: str = ""
    closes_after_stream: bool = False  # as llama.cpp does, without saying so
    two_token_words: tuple[str, ...] = ()


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.completions = 0
        self.sent: list[list[float]] = []
        self.bodies: list[dict[str, Any]] = []


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    script: Script
    state: _State

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _json(self, status: int, value: object, **headers: str) -> None:
        body = msgspec.json.encode(value)
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, message: str, **headers: str) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error"}}, **headers)

    def do_GET(self) -> None:
        path = self.path.removeprefix(self.script.prefix)
        if self.script.silent:
            time.sleep(3600)
        if path == "/sent":
            return self._json(200, {"sent": self.state.sent, "bodies": self.state.bodies})
        if self._locked():
            return self._refuse(401, "Incorrect API key provided")
        if path == "/health":
            return self._json(200, {"status": "ok"})
        if path == "/v1/models" and self.script.has_models:
            extra: dict[str, Any] = {} if self.script.n_vocab is None else {"meta": {"n_vocab": self.script.n_vocab}}
            extra |= {} if self.script.max_model_len is None else {"max_model_len": self.script.max_model_len}
            return self._json(200, {"object": "list", "data": [{"id": m, **extra} for m in self.script.models]})
        return self._refuse(404, f"no route {path}")

    def _locked(self) -> bool:
        key = self.script.api_key
        return key is not None and self.headers.get("Authorization") != f"Bearer {key}"

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.removeprefix(self.script.prefix)
        if path == "/tokenize" and self.script.has_tokenize and "content" in body:
            return self._json(200, {"tokens": [hash_of(word) for word in body["content"].split()]})
        known = {"/v1/completions": self.script.completions, "/v1/chat/completions": self.script.chat}
        if not known.get(path, False):
            return self._refuse(404, f"no route {path}")
        with self.state.lock:
            self.state.completions += 1
            number = self.state.completions
            self.state.bodies.append(body)
        if self.script.dies_after is not None and number > self.script.dies_after:
            os._exit(1)
        if not self._turned_away(body, number):
            self._complete(body, chat=path.endswith("chat/completions"))
        return None

    def _turned_away(self, body: dict[str, Any], number: int) -> bool:
        script = self.script
        fields = {*body, *body.get("stream_options", {})}
        refused = next((name for name in script.refuses if name in fields), None)
        if self._locked():
            self._refuse(401, "Incorrect API key provided")
        elif number <= script.limited_requests:
            self._refuse(429, "too many requests", Retry_After="0")
        elif script.status is not None:
            self._refuse(script.status, "scripted refusal")
        elif refused is not None:
            self._refuse(400, f"Unrecognized request argument: {refused}" if script.names_the_field else "bad request")
        elif script.refuses_ids and isinstance(body.get("prompt"), list):
            self._refuse(400, "prompt must be a string" if script.names_the_field else "bad request")
        elif script.refuses_longer_than is not None and self._prompt_tokens(body) > script.refuses_longer_than:
            named = f"maximum context length is {script.refuses_longer_than} tokens"
            self._refuse(400, named if script.names_the_field else "the prompt is too long")
        else:
            return False
        return True

    def _prompt_tokens(self, body: dict[str, Any]) -> int:
        if isinstance(body.get("prompt"), list):
            return len(body["prompt"])
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        own = self.script.template if "messages" in body else self.script.bos
        return own + sum(2 if word in self.script.two_token_words else 1 for word in text.split())

    def _complete(self, body: dict[str, Any], chat: bool) -> None:
        if not self.script.streams:
            return self._json(200, {"choices": [{"text": "all at once", "finish_reason": "length"}]})
        began = time.perf_counter()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent: list[float] = []
        self.state.sent.append(sent)
        for wait, event, counts in self._events(body, chat):
            if wait is not None:
                began += wait
                _sleep_until(began)
            if event is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return None
            data = event.encode()
            if counts:
                sent.append(time.perf_counter())
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.script.closes_after_stream
        return None

    def _events(self, body: dict[str, Any], chat: bool) -> Iterator[tuple[float | None, str | None, bool]]:
        """(seconds after the last wait, text to send or None to cut the connection, whether it carries tokens)."""
        script, end = self.script, self.script.newline * 2
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        total = min(asked, script.stop_after if script.stop_after is not None else asked)
        prompt = self._prompt_tokens(body)
        if script.comments:
            yield None, f": keep-alive{end}", False
        if chat and script.role_chunk:
            yield None, self._event({"role": "assistant", "content": ""}, chat, prompt, 0), False
        for number, start in enumerate(range(0, total, script.tokens_per_chunk)):
            if number == script.cut_after:
                yield None, None, False
            if number == script.error_after:
                yield None, self._data({"error": {"message": "out of memory", "code": 500}}), False
                return
            wait = script.stalls.get(
                start, script.gap_s if start else script.first_token_s + script.per_token_s * prompt
            )
            so_far = min(total, start + script.tokens_per_chunk)
            text = " word" * (so_far - start)
            yield wait, self._event({"content": text} if chat else text, chat, prompt, so_far), True
            if script.comments:
                yield None, f": ping{end}", False
        yield from self._ending(body, chat, prompt, total)

    def _ending(
        self, body: dict[str, Any], chat: bool, prompt: int, total: int
    ) -> Iterator[tuple[float | None, str | None, bool]]:
        script, end = self.script, self.script.newline * 2
        reason = "stop" if script.stop_after is not None else "length"
        if script.finish:
            yield None, self._event({} if chat else "", chat, prompt, total, reason), False
        wanted = body.get("stream_options", {}).get("include_usage")
        if wanted and script.usage in ("continuous", "final", "null_then_final"):
            yield None, self._data({"choices": [], "usage": self._usage(prompt, total)}), False
        if script.done:
            yield None, f"data: [DONE]{end}", False

    def _event(self, content: Any, chat: bool, prompt: int, so_far: int, reason: str | None = None) -> str:
        choice = {"index": 0, "delta" if chat else "text": content, "finish_reason": reason}
        usage: dict[str, Any] = {}
        continuous = self.script.usage == "continuous" and "continuous_usage_stats" not in self.script.refuses
        if continuous or (reason and self.script.usage == "final_on_finish"):
            usage = {"usage": self._usage(prompt, so_far)}
        elif self.script.usage == "null_then_final":
            usage = {"usage": None}
        return self._data({"choices": [choice], **usage})

    def _usage(self, prompt: int, completion: int) -> dict[str, Any]:
        cached = {} if self.script.cached is None else {"prompt_tokens_details": {"cached_tokens": self.script.cached}}
        return {"prompt_tokens": prompt, "completion_tokens": completion, **cached}

    def _data(self, value: object) -> str:
        return f"data: {msgspec.json.encode(value).decode()}{self.script.newline * 2}"


def hash_of(word: str) -> int:
    """A token id for a word, the same in every process."""
    return 1000 + sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 40000


@contextmanager
def scripted(**script: Any) -> Iterator[str]:
    """Address of a server that runs ``Script(**script)`` for the length of the block."""
    with forked(make_server, msgspec.json.encode(Script(**script))) as url:
        yield url + script.get("prefix", "")


def make_server(script: str) -> ThreadingHTTPServer:
    """The server of a script."""
    handler = type("Handler", (_Handler,), {"script": msgspec.json.decode(script, type=Script), "state": _State()})
    return ThreadingHTTPServer(("127.0.0.1", 0), handler)
