"""A phase split as one HTML page and as JSON."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

import msgspec

from biphase.analysis.phase_split import Point, Split, Unit
from biphase.analysis.split_meaning import percent
from biphase.experiments.split import SplitResult
from biphase.report.page import document, figure
from biphase.report.plots import WIDTH, Axes, Series, plot
from biphase.report.pretty_json import pretty_json
from biphase.report.split_tables import count, facts, heading, seconds, sources, unit_rows

PREFILL, DECODE, RUNNING, WAITING = 0, 1, 2, 3
"""Colours of the page."""
BAR_HEIGHT, ROW_HEIGHT = 26, 64
CAPTION = (
    "Each bar is its unit's own whole: bars are never added or compared in length. Request-seconds overlap, so their "
    "share changes with the batch although the work does not."
)
COUNTED = (
    "Means between two scrapes. A token counts when the engine counts it: prompts at the end of their prefill, "
    "and with some engines everything at a request's end."
)


def split_json(result: SplitResult) -> bytes:
    """The result with the fields of its split at the top level."""
    content = msgspec.to_builtins(result)
    content |= content.pop("split")
    return pretty_json(content)


def split_page(result: SplitResult) -> str:
    """The whole document."""
    title = f"{result.split.engine}: prefill and decode of live traffic"
    return document(title, "\n".join(part for make in _SECTIONS for part in make(result)))


def _head(result: SplitResult) -> Iterator[str]:
    yield f"<h1>{escape(result.split.engine)}: prefill and decode of live traffic</h1>"
    yield f'<p class="quiet">{escape(heading(result))}</p>'
    if result.error is not None:
        yield f'<p class="warning"><b>The watch broke off:</b> {escape(result.error)}</p>'
    for verdict in result.verdicts:
        yield (
            f'<p class="warning"><b>{escape(verdict.name)}</b> {escape(verdict.sentence)}. '
            f"<i>What to do:</i> {escape(verdict.advice)}.</p>"
        )


def _units(result: SplitResult) -> Iterator[str]:
    found = result.split
    yield figure("The split in three units", units_svg(found), CAPTION)
    yield from _meaning(result)
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th>{name}</th>" for name in ("unit", "prefill", "decode", "prefill share", "what it tells"))
    yield "</tr></thead><tbody>"
    for *cells, tells in unit_rows(found):
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        yield f'<tr>{numbers}<td style="white-space: normal; text-align: left">{escape(tells)}</td></tr>'
    yield "</tbody></table></div>"


def _meaning(result: SplitResult) -> Iterator[str]:
    if result.meaning:
        yield '<section style="grid-column: auto"><h2>What it means</h2><ul>'  # beside the picture
        for said in result.meaning:
            yield f"<li><b>{escape(said.name)}</b>: {escape(said.sentence)}. <i>{escape(said.advice)}.</i></li>"
        yield "</ul></section>"


def units_svg(found: Split) -> str:
    """A bar for each unit, prefill and decode as parts of its whole."""
    modelled = ", modelled" if found.engine_s.origin == "modelled" else ""
    rows: tuple[tuple[str, Unit, Callable[[float], str]], ...] = (
        ("tokens", found.tokens, count),
        ("request-seconds", found.request_s, seconds),
        (f"engine-seconds{modelled}", found.engine_s, seconds),
    )
    bars = "".join(_bar(number, *row) for number, row in enumerate(rows))
    title = "Shares of prefill and decode in tokens, request-seconds and engine-seconds"
    return f'<svg viewBox="0 0 {WIDTH} {ROW_HEIGHT * len(rows)}" role="img"><title>{title}</title>{bars}</svg>'


def _bar(number: int, name: str, unit: Unit, show: Callable[[float], str]) -> str:
    top = ROW_HEIGHT * number
    bar_top = top + 24
    head = _text(4, top + 16, name, "start")
    if unit.prefill is None or unit.decode is None or unit.prefill_share is None:
        box = f'<rect class="mark" fill="none" x="4" y="{bar_top}" width="{WIDTH - 8}" height="{BAR_HEIGHT}"/>'
        return head + box + _text(WIDTH / 2, bar_top + 18, _missing(unit), "middle")
    split = 4 + (WIDTH - 8) * unit.prefill_share
    said = (
        f"prefill {show(unit.prefill.value)} ({percent(unit.prefill_share)}), "
        f"decode {show(unit.decode.value)} ({percent(1 - unit.prefill_share)})"
    )
    return (
        head
        + _text(WIDTH - 4, top + 16, said, "end")
        + f'<rect class="fill{PREFILL}" x="4" y="{bar_top}" width="{split - 4:.1f}" height="{BAR_HEIGHT}"/>'
        + f'<rect class="fill{DECODE}" x="{split:.1f}" y="{bar_top}" width="{WIDTH - 4 - split:.1f}" '
        f'height="{BAR_HEIGHT}"/>'
    )


def _missing(unit: Unit) -> str:
    if unit.prefill is None and unit.decode is None:
        return "not known"
    if unit.prefill is None or unit.decode is None:
        return f"{'prefill' if unit.prefill is None else 'decode'} not known"
    return "nothing in this window"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _timeline(result: SplitResult) -> Iterator[str]:
    points = result.split.timeline
    if len(points) < 2 or points[-1].at_s <= 0:
        return
    rates = _series(
        ("prefill", PREFILL, _steps(points, lambda point: point.prefill_tok_per_s)),
        ("decode", DECODE, _steps(points, lambda point: point.decode_tok_per_s)),
    )
    if rates:
        picture = plot("Tokens a second of both phases over time", Axes("seconds", "tokens/s"), rates)
        yield figure("Tokens over time", picture, COUNTED)
    requests = _series(
        ("running", RUNNING, [(point.at_s, point.running) for point in points if point.running is not None]),
        ("waiting", WAITING, [(point.at_s, point.waiting) for point in points if point.waiting is not None]),
    )
    if requests:
        picture = plot("Requests over time", Axes("seconds", "requests"), requests)
        yield figure("Requests over time", picture, "As the server showed them at each scrape.")


def _series(*named: tuple[str, int, list[tuple[float, float]]]) -> list[Series]:
    return [Series(name, found, color) for name, color, found in named if found]


def _steps(points: Sequence[Point], value: Callable[[Point], float | None]) -> list[tuple[float, float]]:
    """A rate holds from the scrape before to its own."""
    corners, before = [], 0.0
    for point in points:
        rate = value(point)
        if rate is not None:
            corners += [(before, rate), (point.at_s, rate)]
        before = point.at_s
    return corners


def _details(result: SplitResult) -> Iterator[str]:
    yield "<h2>Counted beside it</h2><ul>"
    for line in facts(result.split):
        yield f"<li>{escape(line)}</li>"
    yield "</ul><h2>Where the numbers come from</h2><ul>"
    for line in sources(result.split):
        yield f"<li>{escape(line)}</li>"
    yield f'</ul><h2>Made by</h2><p class="command"><code>{escape(result.command)}</code></p>'
    yield f"<p>biphase {escape(result.biphase)}</p>"


_SECTIONS: tuple[Callable[[SplitResult], Iterator[str]], ...] = (_head, _units, _timeline, _details)
