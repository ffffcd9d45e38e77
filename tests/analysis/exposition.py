"""Two scrapes of a server's metrics in the text format of the library that its engine uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["python", "rust", "plain"]
"""prometheus_client of Python adds ``_total`` and ``_created``; Rust's exporters add nothing; plain is llama.cpp's."""
Values = tuple[float, float] | tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Metric:
    """One series: ``values`` before and after; of a histogram each is its sum and its count."""

    kind: str
    name: str
    values: Values
    labels: dict[str, str]

    def lines(self, style: Style, when: int) -> list[str]:
        """Its samples, without HELP and TYPE."""
        value = self.values[when]
        if isinstance(value, tuple):
            return self._histogram(style, *value)
        total = "_total" if self.kind == "counter" and style == "python" else ""
        found = [f"{self.name}{total}{_inside(self.labels)} {_number(value, style)}"]
        created = [f"{self.name}_created{_inside(self.labels)} 1.7e+09"]
        return found + (created if total else [])

    def _histogram(self, style: Style, sum_: float, count: float) -> list[str]:
        buckets = [
            f"{self.name}_bucket{_inside({**self.labels, 'le': limit})} {_number(part * count, style)}"
            for limit, part in (("0.3", 0.0), ("1.0", 0.5), ("+Inf", 1.0))
        ]
        ends = [
            f"{self.name}_{end}{_inside(self.labels)} {_number(v, style)}"
            for end, v in (("sum", sum_), ("count", count))
        ]
        return [*buckets, *ends, *([f"{self.name}_created{_inside(self.labels)} 1.7e+09"] if style == "python" else [])]


def _inside(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


def _number(value: float, style: Style) -> str:
    return repr(float(value)) if style == "python" else f"{value:g}"


def counter(name: str, before: float, after: float, **labels: str) -> Metric:
    return Metric("counter", name, (before, after), labels)


def gauge(name: str, before: float, after: float, **labels: str) -> Metric:
    return Metric("gauge", name, (before, after), labels)


def histogram(name: str, before: tuple[float, float], after: tuple[float, float], **labels: str) -> Metric:
    return Metric("histogram", name, (before, after), labels)


def texts(style: Style, metrics: Sequence[Metric]) -> tuple[str, str]:
    """The page before and after."""
    return _text(style, metrics, 0), _text(style, metrics, 1)


def _text(style: Style, metrics: Sequence[Metric], when: int) -> str:
    lines: list[str] = []
    for name in dict.fromkeys(metric.name for metric in metrics):
        family = [metric for metric in metrics if metric.name == name]
        total = "_total" if family[0].kind == "counter" and style == "python" else ""
        help_line = [] if style == "rust" else [f"# HELP {name}{total} What it counts."]
        lines += [*help_line, f"# TYPE {name}{total} {family[0].kind}"]
        lines += [line for metric in family for line in metric.lines(style, when)]
        lines += [""] if style == "rust" else []
    return "\n".join(lines) + "\n"
