"""Small plots as inline SVG: axes with units, points, curves, bars; colours come from the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48


@dataclass(frozen=True)
class Scale:
    """From values to a coordinate; ``log`` needs positive values."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if high / low < 8:  # hardly a decade: it would have one round number
        return _linear_ticks(low, high)
    steps = (1, 2, 5) if len(decades) <= 3 else (1,)
    return [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high * 1.0001]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """A range that holds the values with room; a linear one begins at zero."""
    low, high = min(values), max(values)
    if log:
        return low / 1.25, max(high, low * 1.01) * 1.25
    return 0.0, (high or 1.0) * 1.08


@dataclass(frozen=True)
class Series:
    """Named points; ``style``: dots, line or dashes; ``color`` is the number of a colour of the page."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    style: str = "line"


@dataclass(frozen=True)
class Axes:
    """Titles with units, and whether an axis is logarithmic; ``marks`` are named vertical lines."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    marks: Sequence[tuple[str, float]] = field(default_factory=tuple)


def plot(title: str, axes: Axes, series: Sequence[Series]) -> str:
    """An SVG of the series, with a legend; ``title`` is what a screen reader says. Needs at least one point."""
    xs = [x for s in series for x, _ in s.points] + [x for _, x in axes.marks]
    ys = [y for s in series for _, y in s.points]
    x = Scale(*_span(xs, axes.log_x), LEFT, WIDTH - RIGHT, axes.log_x)
    y = Scale(*_span(ys, axes.log_y), HEIGHT - BOTTOM, TOP + 18 * _rows(series), axes.log_y)
    parts = [*_grid(x, y), *_marks(axes, x, y), *(_drawn(s, x, y) for s in series), *_titles(axes), *_legend(series)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'


def _grid(x: Scale, y: Scale) -> list[str]:
    found = []
    for tick in x.ticks():
        found.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{y.start:.1f}" y2="{y.end:.1f}"/>')
        found.append(_text(x(tick), HEIGHT - BOTTOM + 18, tick_text(tick), "middle"))
    for tick in y.ticks():
        found.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        found.append(_text(LEFT - 6, y(tick) + 4, tick_text(tick), "end"))
    return found


def tick_text(value: float) -> str:
    """A round number without trailing zeros."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str, css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _marks(axes: Axes, x: Scale, y: Scale) -> list[str]:
    found = []
    for number, (name, at) in enumerate(axes.marks):
        found.append(f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y.start:.1f}" y2="{y.end:.1f}"/>')
        left = x(at) > (LEFT + WIDTH) / 2
        found.append(_text(x(at) + (-5 if left else 5), y.end + 12 + 15 * number, name, "end" if left else "start"))
    return found


def _drawn(series: Series, x: Scale, y: Scale) -> str:
    places = [(x(a), y(b)) for a, b in series.points]
    if series.style == "dots":
        return "".join(f'<circle class="fill{series.color}" cx="{a:.1f}" cy="{b:.1f}" r="3.2"/>' for a, b in places)
    path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dashes = ' stroke-dasharray="6 4"' if series.style == "dashes" else ""
    return f'<path class="line{series.color}" d="{path}"{dashes}/>'


def _titles(axes: Axes) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, axes.y, "middle")}</g>'
    return [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, axes.x, "middle"), turned]


def _rows(series: Sequence[Series]) -> int:
    return -(-len(series) // 2)


def _legend(series: Sequence[Series]) -> list[str]:
    found = []
    for number, one in enumerate(series):
        x, y = LEFT + 8 + (number % 2) * (WIDTH - LEFT) / 2, TOP + 18 * (number // 2)
        found.append(f'<rect class="fill{one.color}" x="{x:.0f}" y="{y - 9}" width="14" height="5"/>')
        found.append(_text(x + 20, y, one.name, "start"))
    return found


def bars(title: str, parts: Sequence[tuple[str, float, str]], unit: str) -> str:
    """Horizontal bars, (name, value, what is said of it) each; values below zero are drawn to the left of zero."""
    low, high = min(0.0, *(v for _, v, _ in parts)), max(1e-9, *(v for _, v, _ in parts))
    x = Scale(low, high, 250, WIDTH - 170)
    rows = []
    for number, (name, value, note) in enumerate(parts):
        y = 10 + 30 * number
        start, end = sorted((x(0.0), x(value)))
        rows.append(_text(242, y + 15, name, "end"))
        rows.append(f'<rect class="fill{number % 4}" x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="20"/>')
        rows.append(_text(max(end, x(0.0)) + 6, y + 15, f"{value:.3g} {unit} ({note})", "start"))
    height = 20 + 30 * len(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img"><title>{escape(title)}</title>{"".join(rows)}</svg>'
