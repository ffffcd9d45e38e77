"""Two profiles, or two benches, side by side on a terminal."""

import math
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from biphase.analysis.comparing import Comparison, Difference, Profile
from biphase.analysis.comparing_levels import LevelDifference
from biphase.report.laws_text import significant
from biphase.report.terminal import PIPED_WIDTH

LEVELS = (
    "x: B / A, below 1 is worse; + and -: percentage points that B has more or less. In brackets the 95 % interval, "
    "which takes requests as independent; of a search the bracket that its levels leave. Goodput of an open loop is "
    "the share attained of the rate at which requests came in both runs: how many came in one is chance."
)
LENGTHS = "B / A above 1 is slower; in brackets its 95 % interval, and only an interval without 1 is a difference."
_STYLES = {"worse": "red", "better": "green", "no difference": ""}


def print_comparison(first: Profile, second: Profile, found: Comparison, console: Console | None = None) -> None:
    """A line for each level, and for each phase and length: both numbers, the change with its interval, the verdict."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for name, profile in (("A", first), ("B", second)):
        console.print(Text(f"{name}: {profile.model} at {profile.url}"), soft_wrap=True)
        if profile.error is not None:
            console.print(Text(f"{name} broke off: {profile.error}", style="yellow"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"not compared: {note}", style="yellow"), soft_wrap=True)
    if found.levels:
        _print(console, _level_table(found.levels), LEVELS)
    if found.differences:
        _print(console, _table(found.differences), LENGTHS)


def _print(console: Console, table: Table, meaning: str) -> None:
    console.print(table)
    console.print(Text(meaning), soft_wrap=True)


def _level_table(found: Sequence[LevelDifference]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("load", "number", "A", "B", "change", "verdict"):
        right = heading in ("A", "B", "change")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "load")
    for load, group in groupby(found, key=lambda d: d.load):
        for index, d in enumerate(group):
            unit = f"{d.name}, % of the due" if d.points else f"{d.name}, {d.unit}"
            cells = (_amount(d.first, d.points), _amount(d.second, d.points), _change(d))
            table.add_row("" if index else load, unit, *cells, Text(d.outcome, style=_STYLES[d.outcome]))
    return table


def _amount(value: float, points: bool) -> str:
    return f"{100 * value:.1f}" if points else significant(value)


def _change(d: LevelDifference) -> str:
    if d.points:
        return f"{100 * d.change:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"
    ends = ", ".join("open" if math.isinf(end) else f"{end:.2f}" for end in (d.low, d.high))
    return f"x {'inf' if math.isinf(d.change) else f'{d.change:.3f}'} [{ends}]"


def _table(found: Sequence[Difference]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("phase", "prompt tokens", "A ms", "B ms", "B / A", "verdict"):
        table.add_column(heading, justify="left" if heading in ("phase", "verdict") else "right", no_wrap=True)
    for d in found:
        interval = "unknown" if d.high == float("inf") else f"{d.low:.2f}, {d.high:.2f}"
        cells = (d.name, str(d.prompt_tokens), significant(d.first_ms), significant(d.second_ms))
        table.add_row(*cells, f"{d.ratio:.3f} [{interval}]", Text(d.outcome, style=_STYLES[d.outcome]))
    return table
