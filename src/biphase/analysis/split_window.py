"""What counters and gauges did between scrapes, and terms over them that say how a quantity is computed.

A ``Term`` is None as soon as one of its names is missing. A counter counts from zero when its series is new: engines
show a series only once it was needed. Restarts are found in single series: a sum can hide the reset of one rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from biphase.client.scrape import Labels, Scrape, normal


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value and the names it was computed from."""

    value: float
    source: str


@dataclass(frozen=True)
class Window:
    """Scrapes of one process of a server in the order of their times; at least one."""

    scrapes: Sequence[Scrape]

    @property
    def seconds(self) -> float:
        """From the first scrape to the last."""
        return self.scrapes[-1].at - self.scrapes[0].at

    def gain(self, name: str, wanted: "Wanted") -> float | None:
        """What a counter gained, summed over its series; None where it, or every wanted series, is missing."""
        first, last = (self.scrapes[i].series.get(name, {}) for i in (0, -1))
        gains = [value - first.get(labels, 0.0) for labels, value in last.items() if wanted(labels)]
        return sum(gains) if gains else None

    def sums(self, name: str) -> list[float]:
        """A gauge at each scrape that has it, summed over its series."""
        return [sum(found.values()) for one in self.scrapes if (found := one.series.get(name))]

    def means(self, name: str) -> list[float]:
        """A gauge at each scrape that has it, averaged over its series: shares of alike engines."""
        return [sum(found.values()) / len(found) for one in self.scrapes if (found := one.series.get(name))]


Wanted = Callable[[Labels], bool]


@dataclass(frozen=True)
class Term:
    """A quantity of a window: ``text`` says how it is computed, ``counters`` are the names it takes gains of."""

    text: str
    counters: frozenset[str]
    names: frozenset[str]
    of: Callable[[Window], float | None]

    def __add__(self, other: "Term") -> "Term":
        return self._with(other, "+", lambda a, b: a + b)

    def __sub__(self, other: "Term") -> "Term":
        """None below zero: the two counters were then not about the same requests."""
        return self._with(other, "-", lambda a, b: a - b if a >= b else None)

    def __truediv__(self, other: "Term") -> "Term":
        return self._with(other, "/", lambda a, b: a / b if b else None)

    def _with(self, other: "Term", sign: str, combine: Callable[[float, float], float | None]) -> "Term":
        def of(window: Window) -> float | None:
            left, right = self.of(window), other.of(window)
            return None if left is None or right is None else combine(left, right)

        text = f"{self.text} {sign} {other.text}"
        return Term(text, self.counters | other.counters, self.names | other.names, of)


def gain(name: str, **labels: str | tuple[str, ...]) -> Term:
    """What a counter gained in the window; ``labels``: of these values only."""
    allowed = {key: (value,) if isinstance(value, str) else value for key, value in labels.items()}

    def wanted(found: Labels) -> bool:
        return all(dict(found).get(key) in values for key, values in allowed.items())

    inside = ",".join(f"{key}={'|'.join(values)}" for key, values in allowed.items())
    key = frozenset({normal(name)})
    text = f"{name}{{{inside}}}" if inside else name
    return Term(text, key, key, lambda window: window.gain(normal(name), wanted))


def running_mean(name: str) -> Term:
    """The mean of a gauge of requests over the scrapes at which there were any."""

    def of(window: Window) -> float | None:
        busy = [value for value in window.sums(normal(name)) if value > 0]
        return sum(busy) / len(busy) if busy else None

    return Term(f"{name}, mean of the scrapes that saw any", frozenset(), frozenset({normal(name)}), of)


def wall(window: Window) -> float | None:
    """Seconds of the window, where its times are known."""
    return window.seconds if window.seconds > 0 else None


WALL = Term("window", frozenset(), frozenset(), wall)


def read(terms: Iterable[Term], window: Window) -> Reading | None:
    """The first of alternatives that is there."""
    return next((Reading(value, term.text) for term in terms if (value := term.of(window)) is not None), None)


def segments(scrapes: Sequence[Scrape], counters: Iterable[str]) -> list[Window]:
    """The scrapes cut where the server was started anew."""
    names = frozenset(counters)
    cuts = [i for i, (a, b) in enumerate(pairwise(scrapes), start=1) if restarted(a, b, names)]
    return [Window(scrapes[start:end]) for start, end in pairwise([0, *cuts, len(scrapes)])]


def restarted(before: Scrape, after: Scrape, counters: Iterable[str]) -> bool:
    """Whether another process answered, or a counter fell or is gone."""
    if before.process is not None and after.process is not None and before.process != after.process:
        return True
    return any(_fell(before.series.get(name, {}), after.series.get(name, {})) for name in counters)


def _fell(before: Mapping[Labels, float], after: Mapping[Labels, float]) -> bool:
    return any(after.get(labels, -1.0) < value for labels, value in before.items())
