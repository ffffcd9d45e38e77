"""The prefill:decode split of a server's traffic in three units that are never mixed.

Tokens: what was computed and generated. Request-seconds: sums over requests, which overlap: where users wait.
Engine-seconds: the machine's own time, where the engine tells it, or where fitted laws allow a model of it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal

import msgspec

from biphase.analysis.split_engines import Engine, recognise
from biphase.analysis.split_window import Reading, Term, Window, read, segments
from biphase.client.scrape import Scrape, normal

SHORTEST_S = 0.1
"""Of a window whose times can be believed: files that were copied together are milliseconds apart."""
FEWEST_FOR_BUSY = 5
"""Scrapes of a gauge from which the share of those that saw a request is taken for the share of time."""

MOST_POINTS = 120
"""Of the timeline; more would draw single engine steps as spikes."""


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both phases in one unit; None is not known. ``origin``: counted by the engine, modelled, or not there."""

    prefill: Reading | None = None
    decode: Reading | None = None
    prefill_share: float | None = None
    origin: Literal["counted", "modelled", "none"] = "none"


class Gauge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gauge over the scrapes of a window."""

    mean: float
    most: float
    first: float
    last: float


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine-seconds of a token: of a prompt token that was computed, of one that was sent (cached ones among them),
    of a generated token; and the last over the first."""

    computed_input_s: float
    sent_input_s: float | None
    output_s: float
    output_over_input: float


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between two scrapes: seconds from the start of the window to its end, tokens a second of each phase, and the
    requests at its end."""

    at_s: float
    prefill_tok_per_s: float | None
    decode_tok_per_s: float | None
    running: float | None
    waiting: float | None


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one window says; counts are of the window. ``engines``: how many report on the page. ``finished`` and all
    request-seconds are of requests that ended inside where the engine counts them at their end."""

    engine: str
    engines: int
    models: tuple[str, ...]
    started: str
    window_s: float | None
    scrapes: int
    tokens: Unit
    request_s: Unit
    engine_s: Unit
    queue_s: Reading | None
    prompt_tokens: Reading | None
    cached_tokens: Reading | None
    generated_tokens: Reading | None
    first_tokens: Reading | None
    finished: Reading | None
    decode_steps: Reading | None
    decode_batch: Reading | None
    preemptions: Reading | None
    cache_hit_rate: float | None
    engine_busy: float | None
    running: Gauge | None
    waiting: Gauge | None
    kv_usage: Gauge | None
    price: Price | None
    engine_s_advice: str
    timeline: tuple[Point, ...]


def recognised(scrapes: Sequence[Scrape]) -> Engine | None:
    """The engine behind a series of scrapes; the last tells most."""
    return next((engine for one in reversed(scrapes) if (engine := recognise(one))), None)


def windows(engine: Engine, scrapes: Sequence[Scrape]) -> list[Window]:
    """The stretches between restarts of the server, in order."""
    return segments(scrapes, engine.counters)


def longest(found: Sequence[Window]) -> Window:
    """The stretch that says most: the longest in time, of alike ones the later."""
    return max(reversed(found), key=lambda window: (window.seconds, len(window.scrapes)))


def split(engine: Engine, window: Window) -> Split:
    """Everything that one window says."""
    seconds = window.seconds if window.seconds >= SHORTEST_S else None
    engines = _engines(engine, window)
    tokens = unit(read(engine.computed, window) or read(engine.prompt, window), _decoded(engine, window))
    engine_s = _engine_seconds(engine, window, tokens)
    running = _gauge([_sum(window, name) for name in engine.running])
    return Split(
        engine=engine.name,
        engines=engines,
        models=_models(window),
        started=datetime.fromtimestamp(window.scrapes[0].at, UTC).isoformat(timespec="seconds"),
        window_s=seconds,
        scrapes=len(window.scrapes),
        tokens=tokens,
        request_s=unit(read(engine.prefill, window), read(engine.decode, window)),
        engine_s=engine_s,
        queue_s=read(engine.queue, window),
        prompt_tokens=read(engine.prompt, window),
        cached_tokens=read(engine.cached, window),
        generated_tokens=read(engine.generated, window),
        first_tokens=read(engine.first_tokens, window),
        finished=read(engine.finished, window),
        decode_steps=read(engine.steps, window),
        decode_batch=_batch(engine, window, tokens),
        preemptions=read(engine.preemptions, window),
        cache_hit_rate=_hit_rate(engine, window, tokens),
        engine_busy=_busy(engine_s, seconds, engines),
        running=running,
        waiting=_gauge([_sum(window, name) for name in engine.waiting]),
        kv_usage=_gauge([window.means(normal(name)) for name in engine.kv_usage]),
        price=price(engine_s, tokens, read(engine.prompt, window), read(engine.generated, window)),
        engine_s_advice=engine.missing,
        timeline=tuple(_timeline(engine, window)),
    )


def unit(prefill: Reading | None, decode: Reading | None, origin: Literal["counted", "modelled"] = "counted") -> Unit:
    """Both phases and the share of prefill, which is None where one is not known or nothing happened."""
    if prefill is None and decode is None:
        return Unit()
    whole = prefill.value + decode.value if prefill is not None and decode is not None else 0.0
    return Unit(prefill, decode, prefill.value / whole if prefill is not None and whole > 0 else None, origin)


def with_engine_seconds(found: Split, engine_s: Unit) -> Split:
    """The split with engine-seconds from elsewhere, and what follows from them."""
    return msgspec.structs.replace(
        found,
        engine_s=engine_s,
        engine_busy=_busy(engine_s, found.window_s, found.engines),
        price=price(engine_s, found.tokens, found.prompt_tokens, found.generated_tokens),
    )


def _decoded(engine: Engine, window: Window) -> Reading | None:
    return read(engine.decoded, window) or read(engine.generated, window)


def _engine_seconds(engine: Engine, window: Window, tokens: Unit) -> Unit:
    prefill, decode = read(engine.engine_prefill, window), read(engine.engine_decode, window)
    if prefill is not None and decode is None and not engine.engine_decode:
        decode = _rest_of_busy(engine, window, prefill)
        return unit(prefill, decode, "modelled" if decode is not None else "counted")
    mixed = read(engine.engine_mixed, window)
    if mixed is None or not mixed.value or tokens.prefill_share is None:
        return unit(prefill, decode)
    return unit(_and_mixed(prefill, mixed, tokens.prefill_share), _and_mixed(decode, mixed, 1 - tokens.prefill_share))


def _and_mixed(phase: Reading | None, mixed: Reading, share: float) -> Reading:
    source = f"{phase.source} + " if phase is not None else ""
    own = phase.value if phase is not None else 0.0
    return Reading(own + share * mixed.value, f"{source}{mixed.source} by tokens")


def _rest_of_busy(engine: Engine, window: Window, prefill: Reading) -> Reading | None:
    """Decode as what is left of the busy time, where a gauge was looked at often enough to know that."""
    seen = next((values for name in engine.running if (values := _sum(window, name))), [])
    if len(seen) < FEWEST_FOR_BUSY or window.seconds <= 0:
        return None
    busy = sum(value > 0 for value in seen)
    rest = window.seconds * busy / len(seen) - prefill.value
    source = f"busy at {busy} of {len(seen)} scrapes x window - {prefill.source}"
    return Reading(rest, source) if rest >= 0 else None


def _batch(engine: Engine, window: Window, tokens: Unit) -> Reading | None:
    """Decode tokens a step, one for each sequence; else what the engine tells of its batch."""
    steps = read(engine.steps, window)
    if steps is not None and steps.value > 0 and tokens.decode is not None:
        return Reading(tokens.decode.value / steps.value, f"decode tokens / {steps.source}")
    return read(engine.batch, window)


def _hit_rate(engine: Engine, window: Window, tokens: Unit) -> float | None:
    """Cached prompt tokens over all; by tokens, as requests with long prefixes weigh more."""
    cached, prompt = read(engine.cached, window), read(engine.prompt, window)
    if cached is None or prompt is None:
        return None
    whole = max(prompt.value, cached.value)
    return cached.value / whole if whole > 0 else None


def _busy(engine_s: Unit, seconds: float | None, engines: int) -> float | None:
    if engine_s.prefill is None or engine_s.decode is None or seconds is None:
        return None
    return (engine_s.prefill.value + engine_s.decode.value) / (seconds * engines)


def price(engine_s: Unit, tokens: Unit, prompt: Reading | None, generated: Reading | None) -> Price | None:
    """Engine-seconds of an input and of an output token; None without both or without tokens of either kind."""
    parts = (engine_s.prefill, engine_s.decode, tokens.prefill, generated)
    if any(part is None or part.value <= 0 for part in parts):
        return None
    prefill, decode, computed, output = (part.value for part in parts if part is not None)
    sent = prefill / prompt.value if prompt is not None and prompt.value > 0 else None
    return Price(prefill / computed, sent, decode / output, (decode / output) / (prefill / computed))


def _sum(window: Window, name: str) -> list[float]:
    return window.sums(normal(name))


def _gauge(alternatives: Sequence[Sequence[float]]) -> Gauge | None:
    values = next((found for found in alternatives if found), None)
    return Gauge(sum(values) / len(values), max(values), values[0], values[-1]) if values else None


def _engines(engine: Engine, window: Window) -> int:
    """Data-parallel ranks and engines that report on the page: most combinations of their labels in one counter."""
    last = window.scrapes[-1].series
    return max(
        (
            len({tuple(dict(labels).get(name) for name in engine.engine_labels) for labels in last.get(counter, {})})
            for counter in engine.counters
        ),
        default=1,
    )


def _models(window: Window) -> tuple[str, ...]:
    series = (labels for found in window.scrapes[-1].series.values() for labels in found)
    return tuple(sorted({value for labels in series for name, value in labels if name in ("model_name", "model")}))


def _timeline(engine: Engine, window: Window) -> Sequence[Point]:
    points = []
    start, every = window.scrapes[0].at, -(-len(window.scrapes) // MOST_POINTS)
    for pair in pairwise((*window.scrapes[:-1:every], window.scrapes[-1])):
        step = Window(pair)
        points.append(
            Point(
                step.scrapes[-1].at - start,
                _rate(engine.computed or engine.prompt, step),
                _rate(engine.decoded, step),
                _last(step, engine.running),
                _last(step, engine.waiting),
            )
        )
    return points


def _rate(terms: Sequence[Term], step: Window) -> float | None:
    found = read(terms, step)
    return found.value / step.seconds if found is not None and step.seconds > 0 else None


def _last(step: Window, names: Sequence[str]) -> float | None:
    return next((values[-1] for name in names if (values := _sum(step, name))), None)
