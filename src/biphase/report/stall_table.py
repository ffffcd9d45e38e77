"""A stall on a terminal: what spoils the numbers, the table, what it means."""

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.analysis.latency import Spread
from biphase.analysis.stall_result import ServerStall, StallResult
from biphase.report.stall_text import short_name, stall_conditions, stall_words, title
from biphase.report.terminal import PIPED_WIDTH
from biphase.report.words import number

HEADINGS = ("", "quiet ITL ms", "p99 gap ms", "worst gap ms", "x quiet", "stalled s", "TTFT ms", "alone ms")


def print_stall(result: StallResult, console: Console | None = None) -> None:
    """Everything on stdout or the console given."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for part in stall_view(result):
        console.print(part, soft_wrap=not console.is_terminal)


def stall_view(result: StallResult) -> Iterator[RenderableType]:
    """Title, failures, warnings, the table, the words about each server, the conditions."""
    yield Text(title(result), style="bold")
    for server in result.servers:
        yield Text(f"{server.name}: {short_name(server)} at {server.url}")
        if server.error is not None:
            yield Text(f"{server.name}: incomplete: {server.error}", style="red")
        for v in server.verdicts:
            yield Text(f"{server.name}: warning: {v.sentence}; {v.advice} ({v.name})", style="yellow")
    if any(server.attacks for server in result.servers):
        yield stall_table(result)
    for server in result.servers:
        for line in stall_words(server):
            yield Text(f"{server.name}: {line}")
    for line in stall_conditions(result):
        yield Text(line, style="dim")


def stall_table(result: StallResult) -> Table:
    """One line a server."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for server in result.servers:
        table.add_row(*stall_cells(server))
    return table


def stall_cells(server: ServerStall) -> list[str]:
    """The cells of a server's row; a dash where there is nothing."""
    quiet, during = server.quiet_gap_ms, server.prefill_gap_ms
    return [
        server.name,
        number(quiet.median) if quiet else "-",
        number(during.p99) if during else "-",
        number(during.worst) if during else "-",
        f"{server.worst_over_quiet:.1f}" if server.worst_over_quiet else "-",
        *map(_median, (server.stalled_s_per_stream, server.ttft_ms, server.ttft_alone_ms)),
    ]


def _median(found: Spread | None) -> str:
    return number(found.median) if found else "-"
