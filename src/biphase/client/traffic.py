"""From a workload and a load to requests that can be sent: when each is due, and a prompt that the server can take."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Literal

import msgspec
from msgspec.structs import replace

from biphase.client.arrivals import arrivals
from biphase.client.openai import Call, Dialect, make_call
from biphase.client.prompts import PromptMaker
from biphase.client.workload_file import Item
from biphase.client.workloads import Workload
from biphase.errors import BadInput

Kind = Literal["constant", "poisson", "gamma", "trace", "closed"]

MOST_PREPARED_BYTES = 1 << 30
ROUNDING_S = 1e-6  # sums of intervals fall short of their whole
BYTES_PER_TOKEN = 6.5  # of a request's body: an id of four or five digits and a comma, or a word and a space


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests come. ``level``: requests a second; of a trace how many times its own speed; of a closed loop how
    many are in flight. ``burstiness`` is the shape of gamma's intervals."""

    kind: Kind
    level: float
    burstiness: float = 1.0

    @property
    def open(self) -> bool:
        """Whether requests come when they are due, whatever is in flight."""
        return self.kind != "closed"

    @property
    def unit(self) -> str:
        """What ``level`` counts."""
        return {"trace": "x trace", "closed": "in flight"}.get(self.kind, "req/s")

    def __str__(self) -> str:
        if self.kind == "closed":
            return f"a closed loop with {self.level:.0f} requests in flight"
        if self.kind == "trace":
            return f"the trace's own arrivals at {self.level:.4g} times their speed"
        shape = f" (burstiness {self.burstiness:g})" if self.kind == "gamma" else ""
        name = {"poisson": "Poisson"}.get(self.kind, self.kind)
        return f"{name} arrivals{shape} at {self.level:.4g} requests/s"


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that were not sent as the workload has them: cut to the server's limit, left out for it, or lengthened
    to the shortest prompt that can be made; ``limit`` is the server's, in tokens."""

    limit: int | None
    clipped: int = 0
    dropped: int = 0
    lengthened: int = 0


class Fitter:
    """Makes requests fit into the context that the server has, and counts those that it changed."""

    def __init__(self, limit: int | None, shortest: int, clip: bool) -> None:
        self._limit = limit
        self._shortest = shortest
        self._clip = clip
        self._counts = {"clipped": 0, "dropped": 0, "lengthened": 0}

    @property
    def fitted(self) -> Fitted:
        """How many requests were changed."""
        return Fitted(self._limit, **self._counts)

    def fit(self, item: Item) -> Item | None:
        """The request as it can be sent; None when it is left out.

        Clipped, an answer takes half the context at most, and the prompt what the answer leaves.
        """
        limit = self._limit
        if item.input_tokens < self._shortest:
            self._counts["lengthened"] += 1
            item = replace(item, input_tokens=self._shortest)
        if limit is None or item.input_tokens + item.output_tokens <= limit:
            return item
        outputs = min(item.output_tokens, limit // 2)
        inputs = min(item.input_tokens, limit - outputs)
        if not self._clip or inputs < self._shortest or outputs < 1:
            self._counts["dropped"] += 1
            return None
        self._counts["clipped"] += 1
        return replace(item, input_tokens=inputs, output_tokens=outputs)


@dataclass(frozen=True)
class Numbered:
    """A request in its place: how often the workload had been used up before it, and its number in the whole run."""

    item: Item
    lap: int
    number: int


def endless(workload: Workload, fitter: Fitter) -> Iterator[Numbered]:
    """The requests that can be sent, in order, again and again; ``BadInput`` when there is none."""
    number = 0
    for lap in count():
        before = number
        for item in workload.items:
            fitted = fitter.fit(item)
            if fitted is not None:
                yield Numbered(fitted, lap, number)
                number += 1
        if number == before:
            limit = fitter.fitted.limit
            raise BadInput(
                f"no request of {workload.name} fits into the server's limit of {limit} tokens; "
                "cut them to it: --too-long clip"
            )


def due(
    workload: Workload, load: Load, duration_s: float, fitter: Fitter, most: int | None, rng: random.Random
) -> Iterator[tuple[float, Numbered]]:
    """Moments in seconds from the start, below ``duration_s``, each with its request; ``most`` at most.

    A trace keeps its gaps, divided by the level: requests are never left out to change a rate. It does not begin anew.
    """
    if load.kind == "trace":
        return islice(_as_recorded(workload, load.level, duration_s, fitter), most)
    process: Literal["constant", "poisson", "gamma"] = load.kind if load.kind != "closed" else "constant"
    moments = arrivals(load.level, process, load.burstiness, rng)
    timely = zip(_below(moments, duration_s), endless(workload, fitter), strict=False)
    return islice(timely, most)


def _below(moments: Iterator[float], end: float) -> Iterator[float]:
    for moment in moments:
        if moment >= end - ROUNDING_S:
            return
        yield moment


def recorded(workload: Workload, speed: float, duration_s: float) -> list[float]:
    """Moments of a trace's requests in seconds from its first, gaps divided by ``speed``, below ``duration_s``."""
    start = workload.items[0].at_s or 0.0
    moments = (((item.at_s or 0.0) - start) / speed for item in workload.items)
    return list(takewhile(lambda at: at < duration_s, moments))


def _as_recorded(
    workload: Workload, speed: float, duration_s: float, fitter: Fitter
) -> Iterator[tuple[float, Numbered]]:
    number = 0
    for at, item in zip(recorded(workload, speed, duration_s), workload.items, strict=False):
        fitted = fitter.fit(item)
        if fitted is not None:
            yield at, Numbered(fitted, 0, number)
            number += 1


def check_size(workload: Workload, load: Load, duration_s: float, most: int | None) -> None:
    """``BadInput`` when the prompts of an open loop, made before its clock starts, would not fit into memory."""
    if not load.open or load.kind == "trace":
        return
    requests = min(load.level * duration_s, math.inf if most is None else most)
    tokens = sum(item.input_tokens for item in workload.items) / len(workload.items)
    size = requests * (tokens * BYTES_PER_TOKEN + 500)
    if size > MOST_PREPARED_BYTES:
        raise BadInput(
            f"{load} for {duration_s:g} s are {requests:,.0f} requests, {size / 2**30:.1f} GiB of prompts that must be "
            "ready before the clock starts (1 GiB at most): lower the rate, --duration or --requests"
        )


class CallMaker:
    """Requests as bytes. ``run`` sets its prompts apart: no block that they share was sent in another run."""

    def __init__(self, dialect: Dialect, prompts: PromptMaker, workload: Workload, run: str) -> None:
        self._dialect = dialect
        self._prompts = prompts
        self._workload = workload
        self._run = run

    def make(self, numbered: Numbered) -> Call:
        """The call of a request."""
        item = numbered.item
        if item.blocks:
            names = [f"{self._run}/{numbered.lap}/{block}" for block in item.blocks]
            prompt = self._prompts.make_of_blocks(item.input_tokens, names, self._workload.block_tokens)
        else:
            prompt = self._prompts.make(item.input_tokens)
        name = f"{self._run}-{numbered.number}"
        return make_call(self._dialect, name, prompt.content, item.input_tokens, item.output_tokens)
