"""The tables of a bench as text, for the terminal and for the page alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from biphase.analysis.bench_result import BenchResult, LevelResult
from biphase.analysis.goodput import Percentiles
from biphase.report.laws_text import significant

NOTHING = "-"


@dataclass(frozen=True)
class Grid:
    """A table: its heading, the names of its columns with units, rows of cells."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def grids(result: BenchResult) -> list[Grid]:
    """Levels, the evidence of the search, TTFT by uncached prompt length: those that have something to say."""
    bench = result.bench
    shown = bench.levels[bench.shown]
    loads = [_levels(bench.levels), _paces(bench.levels)] if bench.saturation is None else [_probes(result)]
    return [grid for grid in (*loads, _latencies(shown), _buckets(shown)) if grid.rows]


def _levels(levels: Sequence[LevelResult]) -> Grid:
    judged = any(level.measured.attainment for level in levels)
    columns = [f"load, {levels[0].load.unit}", "due", "done", "429", "failed", "req/s"]
    columns += ["SLO kept", "goodput, req/s"] if judged else []
    return Grid("Levels of load", columns, [_level_row(level, judged) for level in levels])


def _level_row(level: LevelResult, judged: bool) -> list[str]:
    o, flow, kept = level.measured.outcomes, level.measured.flow, level.measured.attainment
    cells = [significant(level.load.level), str(o.due), str(o.completed), str(o.turned_away)]
    cells += [str(o.failed + o.unfinished), significant(flow.completed)]
    if judged:
        cells += [f"{100 * kept.all:.1f} %" if kept else NOTHING, significant(flow.goodput or 0.0)]
    return cells


def _paces(levels: Sequence[LevelResult]) -> Grid:
    columns = (f"load, {levels[0].load.unit}", "in tok/s", "out tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99")
    rows = [
        (
            significant(level.load.level),
            significant(level.measured.flow.input_tokens),
            significant(level.measured.flow.output_tokens),
            *_pair(level.measured.ttft_ms),
            *_pair(level.measured.itl_ms),
        )
        for level in levels
    ]
    return Grid("Rates and latencies", columns, rows if len(levels) > 1 else ())


def _pair(values: Percentiles | None) -> tuple[str, str]:
    return (significant(values.median), significant(values.p99)) if values is not None else (NOTHING, NOTHING)


def _probes(result: BenchResult) -> Grid:
    found, load = result.bench.saturation, result.bench.levels[0].load
    assert found is not None
    columns = (f"run, {load.unit}", "due", "sent/s", "SLO kept", "95 % interval", "TTFT p95", "ITL p99 ms", "holds")
    rows = [
        (
            significant(p.level),
            str(p.due),
            significant(p.sent_per_s),
            f"{100 * p.attained:.1f} %",
            f"{100 * p.low:.0f}-{100 * p.high:.0f} %",
            significant(p.ttft_p95_ms) if p.ttft_p95_ms is not None else NOTHING,
            significant(p.itl_p99_ms) if p.itl_p99_ms is not None else NOTHING,
            "yes" if p.holds else f"no: {p.why}",
        )
        for p in found.probes
    ]
    return Grid("The search: every run in its order", columns, rows)


def _latencies(level: LevelResult) -> Grid:
    found = level.measured
    measures = (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("ITL", found.itl_ms), ("E2E", found.e2e_ms))
    columns = ("ms", "n", "mean", "p50", "p90", "p95", "p99", "max")
    rows = [(name, *_all(values)) for name, values in measures if values is not None]
    return Grid(f"Latencies under {level.description}", columns, rows)


def _all(values: Percentiles) -> tuple[str, ...]:
    numbers = (values.mean, values.median, values.p90, values.p95, values.p99, values.max)
    return (str(values.n), *map(significant, numbers))


def _buckets(level: LevelResult) -> Grid:
    columns = ("uncached prompt tokens", "requests", "mean tokens", "TTFT p50 ms", "p90", "p99")
    rows = [
        (
            f"{b.above + 1}-{b.up_to}" if b.up_to > b.above + 1 else str(b.up_to),
            str(b.ttft_ms.n),
            f"{b.mean_uncached_tokens:.0f}",
            *map(significant, (b.ttft_ms.median, b.ttft_ms.p90, b.ttft_ms.p99)),
        )
        for b in level.by_uncached
    ]
    return Grid("TTFT by uncached prompt length", columns, rows)


def left_aligned(column: str) -> bool:
    """Whether a column holds words."""
    return column in ("holds", "ms")
