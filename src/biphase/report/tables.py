"""Results as tables and sentences for a terminal."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.analysis.latency import Spread
from biphase.analysis.profile_result import Itl, LengthRow, ProfileResult, Saturation
from biphase.analysis.server_side import ServerSide
from biphase.report.laws_text import law_lines
from biphase.report.terminal import PIPED_WIDTH
from biphase.report.words import plain_words


def print_profile(result: ProfileResult, console: Console | None = None) -> None:
    """Warnings, table, and what is to be said about it, on stdout or the console given."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for part in profile_view(result):
        # in a file a sentence is one line; on a terminal it is wrapped between words
        console.print(part, soft_wrap=not console.is_terminal)


def profile_view(result: ProfileResult) -> list[RenderableType]:
    """What spoils the numbers, what they say in plain words, the table of the two phases, the laws, the conditions."""
    parts: list[RenderableType] = [Text(f"{short_model(result)} at {result.url}", style="bold")]
    parts += [Text(f"incomplete: {result.error}", style="red")] if result.error is not None else []
    parts += [Text(f"warning: {v.sentence}; {v.advice} ({v.name})", style="yellow") for v in result.verdicts]
    parts += [Text(line) for line in plain_words(result)]
    if result.rows:
        parts += [phase_table(result.rows), *(Text(line) for line in findings(result))]
        parts += [Text(line) for line in law_lines(result)]
    parts += [Text(f"left out: {out.prompt_tokens} tokens: {out.reason}") for out in result.left_out]
    parts += [Text(line, style="dim") for line in conditions(result)]
    return parts


def short_model(result: ProfileResult) -> str:
    """The model's name; llama.cpp names a file."""
    return PurePath(result.model).name if result.model.startswith("/") else result.model


def phase_table(rows: Sequence[LengthRow]) -> Table:
    """One line a prompt length: time and rate of prefill, time and rate of decode, each a median with its spread."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("prompt tokens", "prefill ms", "prefill tok/s", "decode ms/token", "decode tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(tokens_cell(row), *map(cell, (row.ttft_ms, row.prefill_tok_per_s)), *map(cell, _decode(row)))
    return table


def tokens_cell(row: LengthRow) -> str:
    """The length asked for, and the server's count where it differs."""
    counted = row.counted_tokens
    return (
        str(row.prompt_tokens) if counted in (None, row.prompt_tokens) else f"{row.prompt_tokens} (counted {counted})"
    )


def _decode(row: LengthRow) -> tuple[Spread | None, Spread | None]:
    return row.decode_ms_per_token, row.decode_tok_per_s


def cell(value: Spread | None) -> str:
    """Median ± half the interquartile range, in four digits."""
    if value is None:
        return "-"
    digits = _digits(value.median)
    if value.n == 1:
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} ± {value.half_iqr:.{digits}f}"


def _digits(value: float) -> int:
    """Decimals that leave about four significant digits."""
    return 0 if value >= 1000 else 1 if value >= 100 else 2


def _number(value: float) -> str:
    return f"{value:.{_digits(value)}f}"


def findings(result: ProfileResult) -> Iterator[str]:
    """What the rows show; there must be some."""
    if result.prefill_saturation is not None:
        yield _saturation_line(result.prefill_saturation, result.rows[-1].prompt_tokens)
    if result.itl_ms is not None:
        yield _itl_line(result.itl_ms)
    yield _spread_line(result)


def _saturation_line(found: Saturation, longest: int) -> str:
    best = f"{_number(found.best_tok_per_s)} tok/s"
    if found.prompt_tokens is None:
        return (
            f"prefill saturation: not reached; throughput still rises at {longest} tokens, the longest ({best} there)"
        )
    return f"prefill saturates at {found.prompt_tokens} tokens: the smallest length with 90 % of the best rate, {best}"


def _itl_line(found: Itl) -> str:
    return (
        f"decode ITL: median {_number(found.median)} ms, p99 {_number(found.p99)} ms, "
        f"worst gap {_number(found.worst_gap)} ms ({found.n} gaps, none averaged)"
    )


def _spread_line(result: ProfileResult) -> str:
    counts = sorted({row.requests for row in result.rows})
    if counts[-1] == 1:
        return "spread: unknown, one request for each length"
    widest = [
        f"{name} {100 * spread.relative:.1f} % (prompt of {length})"
        for name, values in (
            ("prefill", [(row.ttft_ms, row.prompt_tokens) for row in result.rows]),
            ("decode", [(row.decode_ms_per_token, row.prompt_tokens) for row in result.rows]),
        )
        if (known := [(value, length) for value, length in values if value is not None])
        for spread, length in [max(known, key=lambda pair: pair[0].relative)]
    ]
    requests = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"spread: ± is half the interquartile range of {requests} requests; at most {', '.join(widest)}"


def conditions(result: ProfileResult) -> Iterator[str]:
    """What the numbers mean, and how they were made; nothing where nothing was measured."""
    if not result.rows:
        return
    if result.http_round_trip_ms is not None:
        yield (
            "prefill ms is the TTFT a client sees: HTTP, queue, tokenizer, the prefill pass and the first token; "
            f"an HTTP round trip alone takes {result.http_round_trip_ms.median:.2f} ms "
            f"(GET {result.http_round_trip_path}, median of {result.http_round_trip_ms.n})"
        )
    if result.server_side is not None:
        yield _server_line(result.server_side)
    yield (
        f"one request at a time, {result.tokens} tokens each; "
        f"stamps of the client lag by {result.client_lag_ms:.2f} ms at most"
    )
    yield from result.notes


def _server_line(found: ServerSide) -> str:
    """Its own counters, and how far its latencies are below the client's."""
    tokens = f"{found.generation_tokens:,} generated"
    own = f"{found.own_generation_tokens:,}"
    if found.prompt_tokens is not None:
        tokens, own = f"{found.prompt_tokens:,} prompt tokens and {tokens}", f"{found.own_prompt_tokens:,} and {own}"
    exact = found.agree if found.agree is not None else found.generation_tokens == found.own_generation_tokens
    same = "exactly those of this run" if exact else f"this run's are {own}"
    shares = [
        f"mean {name} {_number(mean)} ms, the client's {_number(abs(share))} ms {'above' if share >= 0 else 'below'}"
        for name, mean, share in (
            ("TTFT", found.ttft_mean_ms, found.network_ttft_ms),
            ("ITL", found.itl_mean_ms, found.network_itl_ms),
        )
        if mean is not None and share is not None
    ]
    return "; ".join([f"the server counted {tokens}: {same}", *shares])
