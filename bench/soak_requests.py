"""The requests of bench/soak.py: random ones whose right answers are known, because each was asked alone before.

A known answer ends before the first token whose best two lie closer than ``TIES`` nats: there a sum in another order
may decide. A draw has thousands of such edges, which float32 alone keeps where they are: other engines are asked for
greedy answers only.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

TIES = {"float32": 1e-4, "auto": 0.02}
"""By ``--dtype``: logits of the default engine lie within 0.009 of those of float32, whatever runs beside them."""
BLOCK = 16
"""Tokens of a KV block."""
PATIENCE_S = 180.0
"""Longer than any answer may take behind all others on a busy machine; beyond it a request counts as hung."""

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}

BAD: Sequence[Any] = (
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "model": "another"},
    {"prompt": [10**30]},
    {"prompt": "a", "frobnicate": 1},
    {"prompt": "a", "max_tokens": 10**9},
    b'{"prompt": "\xff"}',
    b"[" * 5000,
)


class WrongError(Exception):
    """An answer that is not the right one."""


class EndedError(Exception):
    """A request that did not get its answer; the text names how it ended."""


@dataclass(frozen=True)
class Known:
    """A request and the answer that it got alone: the text of each chunk, one a token, and how the tokens read."""

    body: dict[str, Any]
    texts: tuple[str, ...]
    tokens: tuple[str, ...]
    finish: str

    def text(self, count: int) -> str:
        return "".join(self.texts[:count])

    def end(self, count: int) -> str:
        return self.finish if count == len(self.texts) else "length"


@dataclass
class Got:
    """What came back of one choice."""

    text: str = ""
    finish: str | None = None
    tokens: tuple[str, ...] = ()


class Client:
    """Sends requests to one server and tells right answers from wrong ones."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def whole(self, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of a request that does not stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with _named_ends():
            async with self.session.post(self.url + path, data=data) as response:
                return response.status, dict(response.headers), json.loads(await response.read())

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The decoded events of a stream, up to its [DONE]; an error, or the lack of it, is an ``EndedError``."""
        with _named_ends():
            async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
                if response.status != 200:
                    check_refusal(response.status, dict(response.headers), await response.json())
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if line.startswith(b"data: "):
                        yield _event(json.loads(line[6:]))
        raise EndedError("stream closed without [DONE]")


def _event(data: Any) -> Any:
    if "error" in data:
        raise EndedError("error event")
    if any(choice["finish_reason"] == "abort" for choice in data["choices"]):
        raise EndedError("finish_reason abort")
    return data


@contextlib.contextmanager
def _named_ends() -> Any:
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise EndedError("connection refused") from error
    except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError) as error:
        raise EndedError("connection closed") from error


def check_refusal(status: int, headers: dict[str, str], body: Any) -> None:
    """Whatever is not an answer has OpenAI's shape; it is an ``EndedError`` with the status in its name."""
    if status == 200:
        return
    if set(body.get("error", ())) != {"message", "type", "param", "code"}:
        raise WrongError(f"HTTP {status} without OpenAI's error object: {body}")
    lower = {name.lower(): value for name, value in headers.items()}
    if status == 429 and not (body["error"]["code"] == "queue_full" and int(lower.get("retry-after", "0")) >= 1):
        raise WrongError(f"429 without its code or Retry-After: {body} {headers}")
    raise EndedError(f"HTTP {status}")


async def ask_alone(client: Client, body: dict[str, Any], tie: float) -> Known:
    """Ask while nothing else runs, and keep what is no tie."""
    texts, tokens, finish = [], [], ""
    async for chunk in client.events("/v1/completions", {**body, "logprobs": 2}):
        choice = chunk["choices"][0]
        best = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True) if choice["logprobs"] else [0.0]
        if len(best) > 1 and best[0] - best[1] < tie:
            break
        texts.append(choice["text"])
        tokens.append(choice["logprobs"]["tokens"][0])
        finish = choice["finish_reason"] or "length"
    return Known(body, tuple(texts), tuple(tokens), finish)


def check(known: Known, got: Got, count: int) -> None:
    """``count`` tokens were asked for. A character that the end cuts off shows as one U+FFFD."""
    right = known.text(count)
    if got.text not in (right, right + "\ufffd") or got.finish != known.end(count):
        raise WrongError(f"{known.body} gave {got.finish} {got.text!r}, alone {known.end(count)} {right!r}")
    if got.tokens and got.tokens != known.tokens[:count]:
        raise WrongError(f"{known.body} gave the tokens {got.tokens}, alone {known.tokens[:count]}")


def check_usage(usage: dict[str, Any], prompt: int, completion: int) -> None:
    right = (prompt, completion, prompt + completion)
    if (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) != right:
        raise WrongError(f"usage {usage}, and {prompt} + {completion} tokens are right")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if not 0 <= cached < prompt or cached % BLOCK:
        raise WrongError(f"{cached} of {prompt} prompt tokens came from the cache")


def choices_of(answer: Any) -> list[Got]:
    return [
        Got(choice["text"], choice["finish_reason"], tuple((choice["logprobs"] or {"tokens": ()})["tokens"]))
        for choice in answer["choices"]
    ]


Kind = Callable[[Client, Sequence[Known], random.Random], Awaitable[None]]


async def whole(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    """One answer, or several equal ones, in one piece."""
    known, n = rng.choice(knowns), rng.choice((1, 1, 1, 2, 3))
    n = n if known.body["temperature"] == 0 else 1  # answer k of n draws with seed + k
    count = rng.randint(1, len(known.texts))
    body = {
        **known.body,
        "max_tokens": count,
        "n": n,
        "priority": rng.choice((0, 0, 1)),
        "logprobs": rng.choice((None, 0)),
    }
    status, headers, answer = await client.whole("/v1/completions", body)
    check_refusal(status, headers, answer)
    for got in choices_of(answer):
        check(known, got, count)
    check_usage(answer["usage"], len(known.body["prompt"]), count * n)


async def streamed(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    known = rng.choice(knowns)
    count = rng.randint(1, len(known.texts))
    body = {**known.body, "max_tokens": count, "stream_options": {"include_usage": True}}
    got = Got()
    usage: dict[str, Any] = {}
    async for chunk in client.events("/v1/completions", body):
        for choice in chunk["choices"]:
            got.text, got.finish = got.text + choice["text"], choice["finish_reason"]
        usage = chunk["usage"] or usage
    check(known, got, count)
    check_usage(usage, len(known.body["prompt"]), count)


async def stopped(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    """A stop string taken from the known answer: the text ends before it, the usage after it."""
    known = rng.choice(knowns)
    text = known.text(len(known.texts))
    start = rng.randrange(len(text)) if text else 0
    stop = text[start : start + rng.randint(1, 6)]
    if not stop or "\ufffd" in stop:
        return
    count = next(n for n in range(1, len(known.texts) + 1) if stop in known.text(n))
    body = {**known.body, "max_tokens": len(known.texts), "stop": [stop, "\x00never"]}
    status, headers, answer = await client.whole("/v1/completions", body)
    check_refusal(status, headers, answer)
    (got,) = choices_of(answer)
    if (got.text, got.finish) != (text[: text.find(stop)], "stop"):
        raise WrongError(f"{body} gave {got.finish} {got.text!r} of {text!r}")
    check_usage(answer["usage"], len(known.body["prompt"]), count)


async def json_mode(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    """Sampled JSON of a schema: valid when it ended by itself."""
    response_format = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    prompt = rng.choice(knowns).body["prompt"]
    body = {"prompt": prompt, "max_tokens": 60, "seed": rng.randrange(2**31), "response_format": response_format}
    status, headers, answer = await client.whole("/v1/completions", body)
    check_refusal(status, headers, answer)
    (got,) = choices_of(answer)
    if got.finish == "stop":
        pet = json.loads(got.text)
        if set(pet) != {"kind", "age"} or pet["kind"] not in ("cat", "dog") or not 0 <= pet["age"] <= 30:
            raise WrongError(f"{got.text!r} is not of the schema")


async def chat(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    """A short chat twice, greedy: the same answer both times, the second as a stream."""
    messages = [{"role": "user", "content": f"Count to {rng.randint(1, 9)}."}]
    body = {"messages": messages, "max_tokens": rng.randint(1, 12), "temperature": 0}
    status, headers, answer = await client.whole("/v1/chat/completions", body)
    check_refusal(status, headers, answer)
    chunks = [chunk async for chunk in client.events("/v1/chat/completions", body)]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    if text != answer["choices"][0]["message"]["content"]:
        raise WrongError(f"{messages} gave {answer['choices'][0]['message']} and as a stream {text!r}")


async def left(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    """The client goes away: while it waits, at its first chunks, or while an answer in one piece is made."""
    known = rng.choice(knowns)
    body = {**known.body, "max_tokens": len(known.texts), "n": rng.choice((1, 3)), "stream": rng.random() < 0.6}
    asking = asyncio.create_task(_read_some(client, body, rng.randint(0, 4)))
    await asyncio.wait((asking,), timeout=rng.uniform(0, 1.5))
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def _read_some(client: Client, body: dict[str, Any], lines: int) -> None:
    with _named_ends():
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            for _ in range(lines):
                await response.content.readline()
            response.close()


async def refused(client: Client, knowns: Sequence[Known], rng: random.Random) -> None:
    status, headers, answer = await client.whole("/v1/completions", rng.choice(BAD))
    if status != 400:
        raise WrongError(f"bad input was answered {status}: {answer}")
    with contextlib.suppress(EndedError):
        check_refusal(status, headers, answer)


KINDS: dict[str, tuple[Kind, float]] = {
    "whole": (whole, 5),
    "streamed": (streamed, 5),
    "stop string": (stopped, 3),
    "JSON": (json_mode, 1.5),
    "chat": (chat, 1),
    "client left": (left, 3),
    "bad input": (refused, 1),
}
"""Each kind of request and how often it comes."""
