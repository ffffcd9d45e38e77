"""From the JSON of one stream event to what it carries, and from all of them to counted chunks.

Servers differ in almost every field (``choices: []`` first or last, ``usage: null``, role-only deltas, reasoning under
two names), so the types here are wide, and a key that nobody reads is ignored. Garbage collection does not follow them
(``gc=False``): at 20,000 chunks a second it would walk all that came so far again and again, and none holds a cycle.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from biphase.client.record import Chunk, ChunkKind, CountSource


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """The server's own counts. ``prompt_tokens`` includes cached ones (vLLM, SGLang, llama.cpp alike)."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    cached_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None

    @property
    def cached(self) -> int | None:
        """Prompt tokens that a prefix cache answered, under any of the names servers use."""
        details = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None
        for named in (details, self.cached_tokens, self.prompt_cache_hit_tokens):
            if named is not None:
                return named
        return None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Payload(msgspec.Struct, gc=False):
    """The body of one event of ``/completions`` or ``/chat/completions``."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None

    @property
    def failure(self) -> str | None:
        """The message of an error object sent inside a stream that began with status 200."""
        if self.error is not None:
            return error_text(self.error)
        return str(self.message) if self.object == "error" else None


_decoder = msgspec.json.Decoder(Payload)


def decode_payload(data: bytes) -> Payload:
    """Raises ``msgspec.DecodeError`` or ``msgspec.ValidationError`` for what is not such a body."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        repaired = data.decode("utf-8", "replace").encode()  # the standard replaces what is not UTF-8
        if repaired == data:
            raise
        return _decoder.decode(repaired)


def error_text(error: object) -> str:
    """The sentence inside an error of any of the usual shapes: text, {message}, {error: ...}, {detail: ...}."""
    if isinstance(error, dict):
        inner = next((error[key] for key in ("message", "error", "detail", "msg") if error.get(key)), None)
        return error_text(inner) if inner is not None else msgspec.json.encode(error).decode()
    if isinstance(error, list):
        return "; ".join(_validation_text(item) for item in error)
    return str(error)


def _validation_text(item: object) -> str:
    # FastAPI's 422: {"loc": ["body", "ignore_eos"], "msg": "Extra inputs are not permitted"}
    place = ".".join(map(str, item["loc"])) + ": " if isinstance(item, dict) and item.get("loc") else ""
    return place + error_text(item)


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One event as it came: its stamp, what it carries, the length of its text, the server's running count if any, and
    the text itself."""

    t: float
    kind: ChunkKind
    size: int
    counted: int | None
    final: bool
    text: str = ""


def arrival(t: float, payload: Payload) -> Arrival:
    """Name what an event carries; ``size`` is 0 when it carries no generated text, ``final`` with a finish reason."""
    choice = payload.choices[0] if payload.choices else None
    kind, text = _content(choice) if choice else ("usage", "")
    counted = payload.usage.completion_tokens if payload.usage else None
    final = choice is not None and choice.finish_reason is not None
    return Arrival(t, kind, len(text), counted, final, text)


def _content(choice: _Choice) -> tuple[ChunkKind, str]:
    if choice.delta is None:
        return "text", _text(choice.text)
    delta = choice.delta
    if text := _text(delta.reasoning_content) or _text(delta.reasoning):
        return "reasoning", text
    if text := _text(delta.content) or _text(delta.refusal):
        return "text", text
    if text := _text(delta.tool_calls) or _text(delta.function_call):
        return "tool", text
    return ("text" if delta.role is None or choice.finish_reason else "role"), ""


def _text(value: object) -> str:
    """The text in a string or in anything nested around strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(_text(inner) for key, inner in value.items() if key not in ("type", "id"))
    return "".join(map(_text, value)) if isinstance(value, list) else ""


def count_tokens(arrivals: Sequence[Arrival]) -> tuple[tuple[Chunk, ...], int | None, CountSource]:
    """Chunks with their tokens, their total, and where the counts come from.

    The server's running count is taken where every event with text has one; else its final count, one token for each
    event if that fits and otherwise spread by length of text; else one token for each event with text, a guess.
    """
    carriers = [a for a in arrivals if a.kind != "usage"]
    total = max((a.counted for a in arrivals if a.counted is not None), default=None)
    if total is None:
        guess = [int(a.size > 0) for a in arrivals]
        return _chunks(arrivals, guess), sum(guess) or None, "chunks" if any(guess) else "none"
    if any(a.counted is not None for a in carriers) and all(a.counted is not None for a in carriers if a.size):
        return _chunks(arrivals, _increments(arrivals)), total, "continuous_usage"
    return _chunks(arrivals, _one_each(arrivals, total) or spread(total, [a.size for a in arrivals])), total, "usage"


def _chunks(arrivals: Sequence[Arrival], counts: Sequence[int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(a.t, n, a.kind) for a, n in zip(arrivals, counts, strict=True))


def _increments(arrivals: Sequence[Arrival]) -> list[int]:
    """Steps of the running count; an event without one, or whose count falls, adds nothing."""
    steps, reached = [], 0
    for a in arrivals:
        now = max(reached, a.counted if a.counted is not None else reached)
        steps.append(now - reached)
        reached = now
    return steps


def _one_each(arrivals: Sequence[Arrival], total: int) -> list[int] | None:
    """One token an event, if the total fits: a token may have no text (half a character) and so may the last (EOS)."""
    texts = [a.size > 0 for a in arrivals]
    silent = [a.size > 0 or (a.kind == "text" and not a.final) for a in arrivals]
    with_eos = [flag or a.final for flag, a in zip(silent, arrivals, strict=True)]
    fitting = (flags for flags in (texts, silent, with_eos) if sum(flags) == total)
    return next(([int(flag) for flag in flags] for flags in fitting), None)


def spread(total: int, sizes: Sequence[int]) -> list[int]:
    """Whole tokens for each event in proportion to the size of its text, and at least one where ``total`` allows it."""
    texts, whole = sum(1 for size in sizes if size), sum(sizes)
    least = 1 if total >= texts else 0
    counts, reached, given = [], 0, 0
    for size in sizes:
        reached += size
        texts -= 1 if size else 0
        due = (2 * total * reached + whole) // (2 * whole) if size else given  # rounded to nearest
        count = min(max(due - given, least), total - given - least * texts) if size else 0
        given += count
        counts.append(count)
    return counts
