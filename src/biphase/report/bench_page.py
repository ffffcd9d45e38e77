"""A bench as one HTML file in the style of the profile's page."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from biphase.analysis.bench_result import BenchResult, LevelResult
from biphase.report.bench_grids import Grid, grids, left_aligned
from biphase.report.bench_tables import elsewhere
from biphase.report.bench_words import answer, conditions
from biphase.report.laws_text import law_lines, significant
from biphase.report.page import document, figure
from biphase.report.plots import Axes, Series, bars, plot
from biphase.report.tables import short_model


def bench_page(result: BenchResult) -> str:
    """The whole document."""
    title = f"{short_model(result.profile)}: {result.bench.workload.name} traffic"
    parts = [*_head(result), *_figures(result), *_tables(result), *_details(result)]
    return document(title, "\n".join(parts))


def _head(result: BenchResult) -> Iterator[str]:
    profile = result.profile
    yield f"<h1>{escape(short_model(profile))} under {escape(result.bench.workload.name)} traffic</h1>"
    yield f'<p class="quiet">{escape(profile.url)} · {escape(profile.started)}</p>'
    if profile.error is not None:
        yield f'<p class="warning"><b>The run broke off:</b> {escape(profile.error)}</p>'
    for verdict in profile.verdicts:
        yield (
            f'<p class="warning"><b>{escape(verdict.name)}</b> {escape(verdict.sentence)}. '
            f"<i>What to do:</i> {escape(verdict.advice)}.</p>"
        )
    for line in elsewhere(result):
        yield f'<p class="warning">{escape(line)}.</p>'
    if not profile.verdicts:
        yield '<p class="good">Nothing was seen that spoils the numbers of the level shown.</p>'
    for line in answer(result):
        yield f'<p class="words">{escape(line)}</p>'


def _figures(result: BenchResult) -> Iterator[str]:
    levels, shown = result.bench.levels, result.bench.levels[result.bench.shown]
    if len({level.load.level for level in levels}) > 1:
        yield from _over_load(result)
    yield from _by_uncached(shown)
    yield from _itl(shown)
    yield from _time_line(shown)
    yield from _price(shown)


def _over_load(result: BenchResult) -> Iterator[str]:
    levels = sorted(result.bench.levels, key=lambda level: level.load.level)
    x = f"load, {levels[0].load.unit}"
    slo = result.bench.slo
    if slo is not None:
        kept = [(lv.load.level, 100 * lv.measured.attainment.all) for lv in levels if lv.measured.attainment]
        target = [(levels[0].load.level, 100 * slo.share), (levels[-1].load.level, 100 * slo.share)]
        series = [Series("requests that keep the SLO", kept, 0, "dots"), Series("asked for", target, 1, "dashes")]
        caption = f"SLO: {slo}. Every run is a dot.{_dotted(result)}"
        axes = Axes(x, "SLO kept, % of the requests", True, False, _found(result))
        yield figure("SLO over load", plot("SLO attainment over load", axes, series), caption)
    yield _rates(levels, x, slo is not None)
    yield _latency_over_load(levels, x)


def _dotted(result: BenchResult) -> str:
    return " Dotted: the highest load that keeps it." if _found(result) else ""


def _found(result: BenchResult) -> Sequence[tuple[str, float]]:
    found = result.bench.saturation
    return ((f"found {significant(found.highest)}", found.highest),) if found is not None and found.highest else ()


def _rates(levels: Sequence[LevelResult], x: str, judged: bool) -> str:
    done = [(level.load.level, level.measured.flow.completed) for level in levels]
    series = [Series("completed", done, 2, "dots")]
    if judged:
        good = [(level.load.level, level.measured.flow.goodput or 0.0) for level in levels]
        series.append(Series("goodput: within the SLO", good, 0, "dots"))
    caption = "Requests a second in the steady part of each run."
    return figure("Throughput over load", plot("Throughput over load", Axes(x, "requests/s", True), series), caption)


def _latency_over_load(levels: Sequence[LevelResult], x: str) -> str:
    ttft = [(level.load.level, level.measured.ttft_ms) for level in levels]
    itl = [(level.load.level, level.measured.itl_ms) for level in levels]
    series = [
        Series("TTFT p50", [(at, v.median) for at, v in ttft if v], 0, "dots"),
        Series("TTFT p99", [(at, v.p99) for at, v in ttft if v], 1, "dots"),
        Series("ITL p50", [(at, v.median) for at, v in itl if v], 2, "dots"),
        Series("ITL p99", [(at, v.p99) for at, v in itl if v], 3, "dots"),
    ]
    positive = [Series(s.name, [(a, b) for a, b in s.points if b > 0], s.color, s.style) for s in series]
    drawn = [s for s in positive if s.points]
    if not drawn:
        return ""
    axes = Axes(x, "ms", True, True)
    caption = "Of all requests and of all gaps in the steady part of each run. Both axes are logarithmic."
    return figure("Latency over load", plot("Latency over load", axes, drawn), caption)


def _by_uncached(level: LevelResult) -> Iterator[str]:
    rows = level.by_uncached
    if not rows:
        return
    points = [(b.mean_uncached_tokens, b.ttft_ms) for b in rows]
    series = [
        Series("TTFT p50", [(at, v.median) for at, v in points], 0, "dots"),
        Series("TTFT p90", [(at, v.p90) for at, v in points], 2, "dots"),
        Series("TTFT p99", [(at, v.p99) for at, v in points], 1, "dots"),
    ]
    axes = Axes("uncached prompt tokens, mean of the bucket", "time to first token, ms", True, True)
    caption = (
        f"Under {level.description}. Buckets are powers of two of the prompt tokens that had to be computed: a prompt "
        "that a prefix cache answers in part counts as the rest of it. Both axes are logarithmic."
    )
    yield figure("TTFT by uncached prompt length", plot("TTFT over uncached prompt length", axes, series), caption)


def _itl(level: LevelResult) -> Iterator[str]:
    found = level.measured.gaps
    if found is None or not found.histogram:
        return
    points = [(edge, float(count)) for low, high, count in found.histogram for edge in (low, high)]
    axes = Axes("inter-token latency, ms", "tokens", True)
    caption = (
        f"{found.n:,} raw gaps, none averaged: median {found.median:.3g} ms, p99 {found.p99:.3g} ms, worst gap "
        f"{found.worst_gap:.3g} ms."
    )
    drawn = plot("Distribution of inter-token latencies", axes, [Series("tokens", points, 3)])
    yield figure("ITL: distribution of the raw gaps", drawn, caption)


def _time_line(level: LevelResult) -> Iterator[str]:
    found = level.measured
    start, end = found.before_s, found.before_s + found.window_s
    marks = (("window begins", start), ("window ends", end))
    if level.moments:
        points = [(m.due_s, m.ttft_ms) for m in level.moments]
        axes = Axes("due, s from the start", "time to first token, ms", marks=marks)
        caption = (
            "Requests that came outside the dotted lines are not measured. A rise to the right is a queue that grows."
        )
        drawn = plot("TTFT over time", axes, [Series("a request", points, 0, "dots")])
        yield figure("TTFT over time", drawn, caption)
    if len(level.in_flight) > 1:
        pairs = pairwise(level.in_flight)
        steps = [point for (a, n), (b, m) in pairs for point in ((a, float(n)), (b, float(n)), (b, float(m)))]
        axes = Axes("s from the start", "requests in flight", marks=marks)
        caption = f"From due to done; {found.occupancy.mean:.3g} on average in the window."
        yield figure("In flight", plot("Requests in flight", axes, [Series("in flight", steps, 2)]), caption)


def _price(level: LevelResult) -> Iterator[str]:
    price = level.price
    if price is None:
        return
    note = price.phase_time.source
    parts = [
        ("a million input tokens", price.input_per_million, note),
        ("a million output tokens", price.output_per_million, note),
        ("input at full use", price.input_at_full_use, note),
        ("output at full use", price.output_at_full_use, note),
    ]
    caption = (
        f"In the currency of {price.per_hour:g} an hour. An output token costs {significant(price.output_to_input)} "
        f"times an input token; phase time {price.phase_time.source}: {price.phase_time.how}."
    )
    yield figure("What tokens cost", bars("Price of tokens", parts, ""), caption)


def _tables(result: BenchResult) -> Iterator[str]:
    for grid in grids(result):
        yield f"<h2>{escape(grid.heading)}</h2>"
        yield _html(grid)


def _html(grid: Grid) -> str:
    sides = [' style="text-align:left"' if left_aligned(name) else "" for name in grid.columns]
    heads = "".join(f"<th{side}>{escape(name)}</th>" for name, side in zip(grid.columns, sides, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{side}>{escape(c)}</td>" for c, side in zip(row, sides, strict=True)) + "</tr>"
        for row in grid.rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _details(result: BenchResult) -> Iterator[str]:
    profile = result.profile
    yield "<h2>How it was made, and what the numbers mean</h2><ul>"
    for line in (*conditions(result), *law_lines(profile)):
        yield f"<li>{escape(line)}</li>"
    versions = " · ".join(f"{name} {version}" for name, version in profile.versions.items())
    yield f'</ul><h2>Made by</h2><p class="command"><code>{escape(profile.command)}</code></p><p>{escape(versions)}</p>'
