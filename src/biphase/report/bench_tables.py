"""A bench on a terminal: warnings, the answer, the tables, the conditions."""

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.analysis.bench_result import BenchResult
from biphase.report.bench_grids import Grid, grids, left_aligned
from biphase.report.bench_words import answer, conditions
from biphase.report.tables import short_model
from biphase.report.terminal import PIPED_WIDTH


def print_bench(result: BenchResult, console: Console | None = None) -> None:
    """On stdout, or the console given."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for part in bench_view(result):
        console.print(part, soft_wrap=not console.is_terminal)


def bench_view(result: BenchResult) -> list[RenderableType]:
    """What spoils the numbers, what they say, the tables, how they were made."""
    profile = result.profile
    parts: list[RenderableType] = [Text(f"{short_model(profile)} at {profile.url}", style="bold")]
    parts += [Text(f"incomplete: {profile.error}", style="red")] if profile.error is not None else []
    parts += [Text(f"warning: {v.sentence}; {v.advice} ({v.name})", style="yellow") for v in profile.verdicts]
    parts += [Text(line, style="yellow") for line in elsewhere(result)]
    parts += [Text(line) for line in answer(result)]
    for grid in grids(result):
        parts += [Text(f"\n{grid.heading}", style="bold"), _table(grid)]
    return [*parts, *(Text(line, style="dim") for line in conditions(result))]


def elsewhere(result: BenchResult) -> list[str]:
    """One line on the verdicts of the levels that are not shown; a level above saturation has some by nature."""
    names: dict[str, list[str]] = {}
    for number, level in enumerate(result.bench.levels):
        for verdict in level.verdicts if number != result.bench.shown else ():
            names.setdefault(verdict.name, []).append(f"{level.load.level:.3g}")
    unit = result.bench.levels[0].load.unit
    parts = [f"{name} at {', '.join(dict.fromkeys(levels))} {unit}" for name, levels in names.items()]
    return [f"warnings of other levels: {'; '.join(parts)}"] if parts else []


def _table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in grid.columns:
        table.add_column(name, justify="left" if left_aligned(name) else "right", no_wrap=not left_aligned(name))
    for row in grid.rows:
        table.add_row(*row)
    return table
