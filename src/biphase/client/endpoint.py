"""Where an OpenAI-compatible API is: its base addresses, one HTTP session, its list of models."""

import asyncio
import base64
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import msgspec

from biphase.client.clock import arrival_clock
from biphase.client.failures import explain_status, explain_transport
from biphase.errors import BadInput, RunFailed
from biphase.redaction import HIDDEN, redacted

CONNECT_LIMIT_S = 10.0
METADATA_LIMIT_S = 20.0
# vLLM's uvicorn and llama.cpp's httplib close an idle connection after 5 s: let go of it before they do
KEEPALIVE_S = 3.0


@dataclass(frozen=True)
class Access:
    """How to talk to a server: extra headers (the API key among them), the longest wait for its next byte, and a file
    of certificates to trust beside the system's (PEM)."""

    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    ca: Path | None = None

    def tls(self) -> ssl.SSLContext | bool:
        """What to check a server's certificate with; ``BadInput`` when the file holds no certificate."""
        if self.ca is None:
            return True
        try:
            context = ssl.create_default_context()
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise BadInput(f"--ca {self.ca}: no certificate in PEM form") from error
        except OSError as error:
            raise BadInput(f"--ca {self.ca}: {error.strerror}") from error
        return context

    def at(self, url: str) -> "tuple[str, Access]":
        """The address without the user and password in it, which go out as a header as the key does, so that nothing
        that shows the address shows them; ``BadInput`` where there is a key too."""
        parts = urlsplit(url)
        login, at, host = parts.netloc.rpartition("@")
        if not at:
            return url, self
        if any(name.lower() == "authorization" for name in self.headers):
            raise BadInput(
                f"{redacted(url)} holds a user and a password, and there is an API key (--api-key, BIPHASE_API_KEY, "
                "OPENAI_API_KEY) or an Authorization header beside it: a server takes one of them"
            )
        user, _, password = login.partition(":")
        basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        headers = {**self.headers, "Authorization": f"Basic {basic}"}
        return urlunsplit(parts._replace(netloc=host)), replace(self, headers=headers)


@dataclass(frozen=True)
class Api:
    """``root``: the address over health, metrics and tokenize. ``base``: the one over models and completions.

    ``listed``: all models that the server names.
    """

    root: str
    base: str
    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    listed: tuple[str, ...] = ()


def parse_url(text: str) -> str:
    """The address without trailing slash and without the name of an endpoint; ``BadInput`` when it is none."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        well_formed = False
    bare_word = "://" not in text and not re.match(r"(localhost|[\w.-]+:\d+|\d+(\.\d+){3})(/|$)", text.strip())
    if not well_formed or bare_word or re.search(r"\s", url):
        shown = re.sub(r"[^'\"\s]*@", f"{HIDDEN}@", text)  # what is no URL may hold its password anywhere
        raise BadInput(f"not the URL of a server: {shown!r}; expected something like http://127.0.0.1:8000")
    return re.sub(r"/+((chat/)?completions|models)?/*$", "", url)


def bases(url: str) -> tuple[str, ...]:
    """Where the API may be for a URL as ``parse_url`` gives it, likeliest first: as it is, or with /v1 after it."""
    if re.search(r"/v\d+\w*$", url):
        return (url,)
    return (f"{url}/v1", url)


def root_of(base: str) -> str:
    """The address without its version: vLLM, SGLang and llama.cpp keep /health and /tokenize beside /v1."""
    return re.sub(r"/v\d+\w*$", "", base)


@dataclass
class Wire:
    """The connection of one request: when it was open and the request could go out, whether it was used before, and
    the longest that bytes on it can have waited for this process (seconds)."""

    ready: float = 0.0
    reused: bool = False
    lag: float = 0.0


def _wire_trace() -> aiohttp.TraceConfig:
    """Tells the ``Wire`` given as ``trace_request_ctx``: opening a connection (TCP, TLS) is no part of a TTFT."""
    trace = aiohttp.TraceConfig()

    async def opened(session: object, context: SimpleNamespace, params: object) -> None:
        if isinstance(context.trace_request_ctx, Wire):
            context.trace_request_ctx.ready = time.perf_counter()

    async def reused(session: object, context: SimpleNamespace, params: object) -> None:
        if isinstance(context.trace_request_ctx, Wire):
            context.trace_request_ctx.ready = time.perf_counter()
            context.trace_request_ctx.reused = True

    trace.on_connection_create_end.append(opened)
    trace.on_connection_reuseconn.append(reused)
    return trace


@asynccontextmanager
async def connect(access: Access) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that keeps connections, asks for no compression (it would hold chunks back) and keeps no cookies."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S, sock_read=access.timeout_s)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=access.tls()),
        headers={"Accept-Encoding": "identity", **access.headers},
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[_wire_trace()],
    ) as session:
        yield session


@dataclass(frozen=True)
class Reply:
    """A whole answer: status, body, seconds from the open connection to its last byte, and its headers by name in any
    case."""

    status: int
    body: bytes
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> object:
        """The body as JSON, or None when it is not."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


async def ask(session: aiohttp.ClientSession, url: str, body: object = None) -> Reply:
    """GET, or POST of a JSON body; whatever status comes is returned, a broken connection raises ``RunFailed``."""
    method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
    patience = min(METADATA_LIMIT_S, session.timeout.sock_read or METADATA_LIMIT_S)
    limit = aiohttp.ClientTimeout(total=patience, sock_connect=CONNECT_LIMIT_S)
    wire, headers = Wire(), {"Content-Type": "application/json"} if data else None
    try:
        async with session.request(
            method, url, data=data, headers=headers, timeout=limit, trace_request_ctx=wire
        ) as response:
            payload = await response.read()
            seconds = max(arrival_clock().handed_before - wire.ready, 0.0)
            return Reply(response.status, payload, seconds, response.headers)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise RunFailed(explain_transport(error, url)) from error


async def find_api(session: aiohttp.ClientSession, url: str, model: str | None) -> Api:
    """Find the API behind a URL by its list of models, and the model to measure.

    Without ``model`` the list must hold exactly one. A server without such a list needs ``model``.
    """
    candidates = bases(url)
    replies = []
    for base in candidates:
        reply = await ask(session, f"{base}/models")
        listed = reply.json() if reply.status == 200 else None
        if isinstance(listed, dict) and isinstance(listed.get("data"), list):
            return _choose(base, [entry for entry in listed["data"] if isinstance(entry, dict)], model)
        if reply.status in (401, 403, 429):
            raise RunFailed(explain_status(reply.status, reply.body, f"{base}/models"))
        replies.append(reply)
    if model is None:
        what = f"HTTP {replies[0].status}" if replies[0].status != 200 else "not a list of models"
        raise RunFailed(
            f"{candidates[0]}/models: {what}; is this the address of an OpenAI-compatible server? "
            "If it has no list of models, name one: --model NAME"
        )
    return Api(root_of(candidates[0]), candidates[0], model)


def _choose(base: str, entries: list[dict[str, object]], model: str | None) -> Api:
    names = [str(entry["id"]) for entry in entries if entry.get("id")]
    if model is None and len(names) != 1:
        listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        problem = f"the server has {len(names)} models: {listed}" if names else "the server lists no model"
        raise BadInput(f"{problem}; say which: --model NAME")
    chosen = model if model is not None else names[0]
    entry = next((entry for entry in entries if entry.get("id") == chosen), {})
    return Api(root_of(base), base, chosen, _length_limit(entry), _meta(entry, "n_vocab"), tuple(names))


def _length_limit(entry: Mapping[str, object]) -> int | None:
    # vLLM and SGLang: max_model_len; llama.cpp: meta.n_ctx, of one slot; gateways: one of the others
    found = [entry.get(key) for key in ("max_model_len", "context_length", "max_context_length", "context_window")]
    found.append(_meta(entry, "n_ctx"))
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)


def _meta(entry: Mapping[str, object], key: str) -> int | None:
    """A number that llama.cpp tells of a model beside what the API asks for."""
    meta = entry.get("meta")
    value = meta.get(key) if isinstance(meta, dict) else None
    return value if isinstance(value, int) else None


ROUND_TRIPS = 10
IDLE_S = 0.03  # as between requests of a measurement: what is asked at once again answers from warm caches


async def round_trip(session: aiohttp.ClientSession, api: Api) -> tuple[str, list[float]]:
    """The path of the cheapest GET this server answers, and the seconds of several of them on an open connection."""
    health = await ask(session, f"{api.root}/health")
    url = f"{api.root}/health" if health.status == 200 else f"{api.base}/models"
    times = []
    for _ in range(ROUND_TRIPS + 1):
        await asyncio.sleep(IDLE_S)
        times.append((await ask(session, url)).seconds)
    return urlsplit(url).path, times[1:]
