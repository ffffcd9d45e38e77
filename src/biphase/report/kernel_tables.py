"""What ``biphase kernels`` shows on a terminal: the roofs, the table of selection, and every kernel beside its roof."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.report.roofline_tables import number
from biphase.report.terminal import PIPED_WIDTH
from biphase.roofline.kernel_rates import KernelRate, KernelReport, Roof

BUSY = 0.1
"""The part of the machine that others may have before it is said."""


def print_kernels(found: KernelReport, console: Console | None = None) -> None:
    """On stdout, or the console given."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for part in kernel_view(found):
        console.print(part, soft_wrap=not console.is_terminal)


def kernel_view(found: KernelReport) -> list[RenderableType]:
    """What spoils the numbers, the roofs, what is selected, the rates, what they mean."""
    parts: list[RenderableType] = [Text(line, style="bold" if n == 0 else "") for n, line in enumerate(_title(found))]
    parts += [Text(f"note: {line}", style="yellow") for line in _warnings(found)]
    parts += [_roof_table(found), selection_table(found), Text(_crossover(found)), rate_table(found.rates)]
    return parts + [Text(line, style="dim") for line in _meaning(found)]


def _title(found: KernelReport) -> Iterator[str]:
    yield (
        f"{found.model}, dtype {found.dtype}, activations {found.activations}, KV cache {found.kv_cache_dtype}: "
        f"{found.weight_bytes / 1e6:,.0f} MB of weights in panels"
    )
    yield f"{found.hardware}; {found.threads} threads; compiled for: {found.features}"


def _warnings(found: KernelReport) -> Iterator[str]:
    if found.interrupted:
        yield (
            f"interrupted: the kernels below were visited {_visits(found)} times of {found.repeats}; what was not "
            "reached is left out"
        )
    if found.foreign_cores is not None and found.foreign_cores > BUSY * found.threads:
        yield (
            f"other processes kept {found.foreign_cores:.1f} cores busy meanwhile, which spoils times more than roofs; "
            "run again on a quiet machine"
        )


def _visits(found: KernelReport) -> str:
    fewest, most = found.visits
    return f"{most}" if fewest == most else f"{fewest} or {most}"


def _roof_table(found: KernelReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("roof, by a bare loop on these threads")
    for heading in ("best", "median"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("reading the weights, GB/s", *_roof_cells(found.roofs.read_gb_per_s))
    for unit, roof in found.roofs.gop_per_s.items():
        table.add_row(f"{unit}, GOP/s", *_roof_cells(roof))
    return table


def _roof_cells(roof: Roof) -> tuple[str, str]:
    return number(roof.best), number(roof.median)


def selection_table(found: KernelReport) -> Table:
    """The table of ``kernels/select.py`` for this processor."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("operator", "few-row program", "many-row program", "torch path"):
        table.add_column(heading, overflow="fold")
    for line in found.selection:
        table.add_row(line["operator"], line["few_rows"], line["many_rows"], line["torch"])
    return table


def _crossover(found: KernelReport) -> str:
    here = crossover_here(found.rates)
    seen = "was slower at each row count" if here is None else f"was no slower from {here} rows on"
    return (
        f"crossover  steps of {found.crossover_rows} rows or more run the many-row program: measured at load, kept for "
        f"this model and machine; in the decode steps below it {seen}"
    )


def crossover_here(rates: Sequence[KernelRate]) -> int | None:
    """The smallest row count from which on the many-row program was no slower in the decode steps of this run."""
    times: dict[int, dict[str, float]] = {}
    for rate in rates:
        if rate.operator == "decode step":
            times.setdefault(rate.rows, {})[rate.program] = rate.ms
    found = None
    for rows in sorted(times, reverse=True):
        few, many = times[rows].get("few rows"), times[rows].get("many rows")
        if few is None or many is None or few < many:
            break
        found = rows
    return found


def rate_table(rates: Sequence[KernelRate]) -> Table:
    """A line for each kernel and shape, a section for each operator."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("operator", "program"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rows", "context", "ms", "GB/s", "GOP/s", "of roof"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("bound by", "chosen"):
        table.add_column(heading, no_wrap=True)
    for operator, group in groupby(rates, key=lambda rate: rate.operator):
        table.add_section()
        for index, rate in enumerate(group):
            table.add_row("" if index else operator, *_cells(rate))
    return table


def _cells(rate: KernelRate) -> tuple[str, ...]:
    return (
        rate.program.removesuffix(" rows"),
        str(rate.rows),
        "" if rate.context_tokens is None else f"{rate.context_tokens:,}",
        number(rate.ms) + (f" ± {number(rate.half_iqr_ms)}" if len(rate.samples_ms) > 1 else ""),
        number(rate.read_gb_per_s),
        number(rate.gop_per_s),
        f"{rate.share_of_roof:.0%}",
        rate.bound_by,
        {True: "chosen", False: "", None: "-"}[rate.chosen],
    )


def _meaning(found: KernelReport) -> Iterator[str]:
    yield (
        "GB/s: panels of weights, and keys and values of each sequence, once. GOP/s: 2 for each multiply-add of the "
        "model. Activations are read from cache and count nothing."
    )
    yield _short_products(found)
    yield (
        "of roof: the longer of bytes / read rate and operations / rate of their unit, at the best rates, over the "
        "time. Keys and values that caches still hold are read faster than this roof."
    )
    yield (
        f"ms: median ± half the interquartile range of {_visits(found)} visits, interleaved with each other and with "
        f"the roofs; {found.seconds:.0f} s in all"
    )


def _short_products(found: KernelReport) -> str:
    few = 2 if found.activations == "exact" else 1
    if "tiles" in found.features:
        many = f"with few rows and {few + 1} with many, of its bf16 operations 3 in chunk attention"
    else:
        many = f"(float weights: {few + 1} with many rows, float32 with few)"
    return f"Of the machine's int8 operations a multiply-add takes {few} {many}: the roof counts those."
