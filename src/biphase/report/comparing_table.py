"""Two profiles side by side on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from biphase.analysis.comparing import Difference, Profile
from biphase.report.laws_text import significant
from biphase.report.terminal import PIPED_WIDTH

_STYLES = {"worse": "red", "better": "green", "no difference": ""}


def print_comparison(
    first: Profile, second: Profile, found: Sequence[Difference], console: Console | None = None
) -> None:
    """A line for each phase and length: both medians, the ratio with its interval, the verdict."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for name, profile in (("A", first), ("B", second)):
        console.print(Text(f"{name}: {profile.model} at {profile.url}"), soft_wrap=True)
        if profile.error is not None:
            console.print(Text(f"{name} broke off: {profile.error}", style="yellow"), soft_wrap=True)
    console.print(_table(found))
    console.print(
        Text("B / A above 1 is slower; in brackets its 95 % interval, and only an interval without 1 is a difference."),
        soft_wrap=True,
    )


def _table(found: Sequence[Difference]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("phase", "prompt tokens", "A ms", "B ms", "B / A", "verdict"):
        table.add_column(heading, justify="left" if heading in ("phase", "verdict") else "right", no_wrap=True)
    for d in found:
        interval = "unknown, one request" if d.high == float("inf") else f"{d.low:.2f}, {d.high:.2f}"
        cells = (d.name, str(d.prompt_tokens), significant(d.first_ms), significant(d.second_ms))
        table.add_row(*cells, f"{d.ratio:.3f} [{interval}]", Text(d.outcome, style=_STYLES[d.outcome]))
    return table
