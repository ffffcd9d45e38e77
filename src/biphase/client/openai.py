"""One streaming request to an OpenAI-compatible server, from first byte out to last byte in, as a ``Record``."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

import aiohttp
import msgspec
from msgspec.structs import replace

from biphase.client.chunks import Arrival, count_tokens, spread
from biphase.client.clock import arrival_clock
from biphase.client.endpoint import Wire
from biphase.client.failures import explain_status, explain_transport
from biphase.client.record import Chunk, CountSource, Record
from biphase.client.tap import Tap
from biphase.client.transcript import Transcript

_JSON = {"Content-Type": "application/json"}
STALE_CONNECTIONS = 10  # as many as a few streams at once can have left behind, each closed by the server meanwhile
AFTER_DONE_S = 1.0  # how long the end of the body may lag behind [DONE] before the connection is given up

PromptForm = Literal["token_ids", "text", "chat"]
OPTIONAL_FIELDS = ("ignore_eos", "continuous_usage_stats", "temperature", "stream_options", "max_tokens")
"""What may be left out of a request when a server refuses it; without ``max_tokens``, ``max_completion_tokens``."""


@dataclass(frozen=True)
class Dialect:
    """How one server wants to be asked: address, model, form of the prompt and the optional fields it accepts."""

    base: str
    model: str
    form: PromptForm = "token_ids"
    fields: frozenset[str] = frozenset(OPTIONAL_FIELDS)

    @property
    def url(self) -> str:
        """Address of the endpoint that takes this form of prompt."""
        return f"{self.base}/chat/completions" if self.form == "chat" else f"{self.base}/completions"


@dataclass(frozen=True)
class Call:
    """One request ready to send: its body is encoded before its clock starts."""

    id: str
    url: str
    body: bytes
    prompt_tokens: int
    max_tokens: int
    form: PromptForm
    warmup: bool = False


def make_call(
    dialect: Dialect, id: str, prompt: str | list[int], prompt_tokens: int, max_tokens: int, warmup: bool = False
) -> Call:
    """Encode a streaming request of this dialect; ``prompt`` is a list of ids for the form ``token_ids``, else text."""
    asked = dialect.fields
    body: dict[str, object] = {"model": dialect.model, "stream": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if dialect.form == "chat" else {"prompt": prompt}
    body["max_tokens" if "max_tokens" in asked else "max_completion_tokens"] = max_tokens
    body |= {"temperature": 0.0} if "temperature" in asked else {}
    body |= {"ignore_eos": True} if "ignore_eos" in asked else {}
    if "stream_options" in asked:
        continuous = {"continuous_usage_stats": True} if "continuous_usage_stats" in asked else {}
        body["stream_options"] = {"include_usage": True, **continuous}
    return Call(id, dialect.url, msgspec.json.encode(body), prompt_tokens, max_tokens, dialect.form, warmup)


@dataclass
class Answer:
    """A record, the events it was made of and, for a refusal, the body and the wait the server asks for (seconds)."""

    record: Record
    body: bytes = b""
    retry_after: float | None = None
    arrivals: Sequence[Arrival] = ()

    @property
    def text(self) -> str:
        """All that was generated."""
        return "".join(arrival.text for arrival in self.arrivals)

    def recounted(self, tokens: int, source: CountSource = "tokenize") -> Record:
        """The record with a tokenizer's count of its text, spread over the chunks where it is not one for each."""
        sizes = [arrival.size for arrival in self.arrivals]
        each = [int(size > 0) for size in sizes]
        counts = each if sum(each) == tokens else spread(tokens, sizes)
        chunks = tuple(Chunk(a.t, n, a.kind) for a, n in zip(self.arrivals, counts, strict=True))
        return replace(self.record, chunks=chunks, completion_tokens=tokens, completion_tokens_source=source)


async def request(session: aiohttp.ClientSession, call: Call, intended: float | None = None) -> Answer:
    """Send one request and read its stream to the end. Never raises for what the server or the network does.

    ``intended``: when the load wanted it to go out, in ``time.perf_counter`` seconds; now, when it does not say.
    The session must come from ``biphase.client.endpoint.connect``.
    """
    intended = time.perf_counter() if intended is None else intended
    for _ in range(STALE_CONNECTIONS):
        answer, stale = await _attempt(session, call, intended)
        if not stale:  # llama.cpp closes a connection after each stream without saying so
            break
    return answer


async def _attempt(session: aiohttp.ClientSession, call: Call, intended: float) -> tuple[Answer, bool]:
    """One try, and whether it failed only because its connection had been closed before it."""
    stream, wire = Transcript(), Wire()
    record = _begin(call, intended)
    try:
        async with session.post(call.url, data=call.body, headers=_JSON, trace_request_ctx=wire) as response:
            head = max(arrival_clock().handed_before, wire.ready)  # parsed since, and this task woken a turn later
            record = replace(record, sent=wire.ready, first_byte=head, status=response.status)
            if response.status != 200:
                return await _refused(response, call, record), False
            await _read(response, stream, wire, session.timeout.sock_read)
    except (TimeoutError, aiohttp.ClientError) as error:
        stream.error = explain_transport(error, call.url)
    record = replace(_end(call, stream, record), client_lag=wire.lag)
    return Answer(record, arrivals=stream.arrivals), wire.reused and record.status is None


def _begin(call: Call, intended: float) -> Record:
    return Record(
        id=call.id,
        intended=intended,
        sent=time.perf_counter(),
        asked_prompt_tokens=call.prompt_tokens,
        asked_completion_tokens=call.max_tokens,
        warmup=call.warmup,
    )


async def _refused(response: aiohttp.ClientResponse, call: Call, record: Record) -> Answer:
    body = await response.read()
    error = explain_status(response.status, body, call.url)
    wait = _retry_after(response.headers.get("Retry-After", ""))
    return Answer(replace(record, error=error, ended=time.perf_counter()), body, wait)


def _retry_after(text: str) -> float | None:
    """Seconds that a Retry-After asks for, itself seconds or a date (RFC 9110, section 10.2.3)."""
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text.strip()):
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


async def _read(response: aiohttp.ClientResponse, stream: Transcript, wire: Wire, timeout_s: float | None) -> None:
    """Stamp what arrives when it arrives, then parse it."""
    if response.content_type == "application/json":
        await response.read()
        stream.error = (
            "the server did not stream: it answered with application/json, so its phases cannot be told apart"
        )
        return

    def receive(now: float, waited: float, received: bytes) -> bool:
        if waited > wire.lag:
            wire.lag = waited
        stream.receive(now, received)
        return stream.done or stream.error is not None

    async with Tap(response, receive, timeout_s) as tap:
        await tap.ended
    if stream.done:
        await _drain(response)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the body, so that the connection can be used again."""
    try:
        async with asyncio.timeout(AFTER_DONE_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError):
        response.close()


def _end(call: Call, stream: Transcript, record: Record) -> Record:
    chunks, completion_tokens, source = count_tokens(stream.arrivals)
    prompt_tokens, prompt_source = _prompt_tokens(call, stream)
    return replace(
        record,
        chunks=chunks,
        ended=stream.ended if stream.ended is not None else time.perf_counter(),
        prompt_tokens=prompt_tokens,
        prompt_tokens_source=prompt_source,
        cached_tokens=stream.cached_tokens,
        completion_tokens=completion_tokens,
        completion_tokens_source=source,
        finish_reason=stream.finish_reason,
        error=stream.error or _incomplete(call, stream, completion_tokens),
    )


def _prompt_tokens(call: Call, stream: Transcript) -> tuple[int | None, CountSource]:
    if stream.prompt_tokens is not None:
        return stream.prompt_tokens, "usage"
    return (call.prompt_tokens, "sent_ids") if call.form == "token_ids" else (None, "none")


def _incomplete(call: Call, stream: Transcript, completion_tokens: int | None) -> str | None:
    if not stream.done and stream.finish_reason is None:
        return f"{call.url}: the stream ended without a finish reason and without [DONE]: it was cut"
    return None if completion_tokens else f"{call.url}: the server answered without a single token"
