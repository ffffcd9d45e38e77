"""A phase split as a table and sentences for a terminal, and the live view of a watch."""

from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.analysis.phase_split import Gauge, Split, Unit
from biphase.analysis.split_meaning import percent
from biphase.analysis.split_window import Reading
from biphase.experiments.split import SplitResult, Watch
from biphase.report.laws_text import significant
from biphase.report.terminal import PIPED_WIDTH

LIVE_SCRAPES = 5
"""Intervals that the live view calls now."""


def print_split(result: SplitResult, console: Console | None = None) -> None:
    """Everything about a split, on stdout or the console given."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for part in split_view(result):
        console.print(part, soft_wrap=not console.is_terminal)


def split_view(result: SplitResult) -> list[RenderableType]:
    """What spoils the numbers, the three units, what else was counted, what it means, where the numbers come from."""
    found = result.split
    parts: list[RenderableType] = [Text(heading(result), style="bold")]
    parts += [Text(f"incomplete: {result.error}", style="red")] if result.error is not None else []
    parts += [Text(f"warning: {v.sentence}; {v.advice} ({v.name})", style="yellow") for v in result.verdicts]
    parts += [unit_table(found), *(Text(line) for line in facts(found))]
    parts += [Text(f"{v.sentence}: {v.advice} ({v.name})", style="cyan") for v in result.meaning]
    parts += [Text(line, style="dim") for line in sources(found)]
    return parts


def heading(result: SplitResult) -> str:
    """Engine, address, length of the window."""
    found = result.split
    many = f", {found.engines} engines summed" if found.engines > 1 else ""
    window = f"{found.window_s:.1f} s from {found.started}" if found.window_s is not None else "times not known"
    models = f", {', '.join(found.models)}" if found.models else ""
    scrapes = f"{found.scrapes} scrape{'s' if found.scrapes != 1 else ''}"
    return f"{found.engine} at {result.url}: {window}, {scrapes}{many}{models}"


def unit_table(found: Split) -> Table:
    """One line a unit; no sum or ratio is taken between lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("unit", no_wrap=True)
    for name in ("prefill", "decode", "prefill share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what it tells")
    for row in unit_rows(found):
        table.add_row(*row)
    return table


def unit_rows(found: Split) -> list[tuple[str, str, str, str, str]]:
    """Unit, both phases, share of prefill, and what the unit tells."""
    return [
        ("tokens", *_cells(found.tokens, count), "what was computed and generated"),
        ("request-seconds", *_cells(found.request_s, seconds), "where users wait (requests overlap)"),
        ("engine-seconds", *_cells(found.engine_s, seconds), _machine(found)),
    ]


def _machine(found: Split) -> str:
    """What engine-seconds tell, or why they do not."""
    unit = found.engine_s
    if unit.prefill is None or unit.decode is None:
        return f"not known: {found.engine_s_advice}" if found.engine_s_advice else "not known"
    return "where the machine works" + (", modelled" if unit.origin == "modelled" else "")


def _cells(unit: Unit, show: Callable[[float], str]) -> tuple[str, str, str]:
    prefill, decode = (show(part.value) if part is not None else "-" for part in (unit.prefill, unit.decode))
    return prefill, decode, percent(unit.prefill_share) if unit.prefill_share is not None else "-"


def count(value: float) -> str:
    """A number of tokens or requests."""
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """Seconds in three digits or more."""
    return f"{value:,.0f}" if value >= 1000 else significant(value)


def facts(found: Split) -> Iterator[str]:
    """What else was counted, a line each; what is not known is left out."""
    yield from _requests(found)
    yield from _prompts(found)
    if found.decode_batch is not None:
        batch = found.decode_batch  # below one it is an average over idle time too, and no batch
        name = "mean decode batch" if batch.value >= 1 else "decoding on average, idle time included"
        yield f"{name}: {batch.value:.2f} sequences ({batch.source})"
    if found.kv_usage is not None:
        usage = found.kv_usage
        yield f"KV cache: {percent(usage.mean)} in use on average, {percent(usage.most)} at most"
    if found.preemptions is not None:
        yield f"preemptions: {count(found.preemptions.value)}"
    if found.engine_busy is not None:
        busy = min(found.engine_busy, 1.0)  # a step is counted at its end, also where it began before the window
        yield f"engine at work: {percent(busy)} of the window"
    yield from _price(found)


def _requests(found: Split) -> Iterator[str]:
    parts = []
    if found.finished is not None:
        rate = f" ({significant(found.finished.value / found.window_s)}/s)" if found.window_s else ""
        parts.append(f"{count(found.finished.value)} ended{rate}")
    parts += [_gauge("running", found.running)] if found.running is not None else []
    parts += [_gauge("waiting", found.waiting)] if found.waiting is not None else []
    if parts:
        yield f"requests: {'; '.join(parts)}"
    if found.queue_s is not None:
        yield f"before prefill: {seconds(found.queue_s.value)} request-seconds in the queue, in neither phase"


def _gauge(name: str, gauge: Gauge) -> str:
    return f"{gauge.mean:.1f} {name} on average, {gauge.most:.0f} at most"


def _prompts(found: Split) -> Iterator[str]:
    if found.prompt_tokens is not None:
        cached = ""
        if found.cached_tokens is not None and found.cache_hit_rate is not None:
            cached = (
                f", {count(found.cached_tokens.value)} of them from the prefix cache ({percent(found.cache_hit_rate)})"
            )
        yield f"prompt tokens: {count(found.prompt_tokens.value)} sent{cached}"
    if found.generated_tokens is not None:
        yield f"generated tokens: {count(found.generated_tokens.value)}, the first of each request by its prefill"


def _price(found: Split) -> Iterator[str]:
    price = found.price
    if price is None:
        return
    cached = price.sent_input_s is not None and price.sent_input_s < price.computed_input_s
    sent = f" ({_ms(price.sent_input_s or 0.0)} for each that was sent)" if cached else ""
    modelled = ", modelled" if found.engine_s.origin == "modelled" else ""
    yield (
        f"price by engine-seconds{modelled}: an output token costs {significant(price.output_over_input)} input "
        f"tokens: {_ms(price.output_s)} of the engine against {_ms(price.computed_input_s)} for each input token "
        f"that was computed{sent}"
    )


def _ms(seconds: float) -> str:
    return f"{significant(1e3 * seconds)} ms"


def sources(found: Split) -> Iterator[str]:
    """Which names each number was read from."""
    if found.queue_s is not None:
        yield f"queue: request-seconds = {found.queue_s.source}"
    for name, unit in (
        ("tokens", found.tokens),
        ("request-seconds", found.request_s),
        ("engine-seconds", found.engine_s),
    ):
        parts = [f"{phase} = {part.source}" for phase, part in _phases(unit) if part is not None]
        if parts:
            yield f"{name}{' (modelled)' if unit.origin == 'modelled' else ''}: {'; '.join(parts)}"


def _phases(unit: Unit) -> tuple[tuple[str, Reading | None], tuple[str, Reading | None]]:
    return ("prefill", unit.prefill), ("decode", unit.decode)


def live_view(watch: Watch) -> RenderableType:
    """What a watch shows after each scrape: now, and since its start."""
    now, every = watch.latest(LIVE_SCRAPES), watch.plan.every
    parts: list[RenderableType] = [
        Text(f"{watch.url}, every {every:g} s; Ctrl-C ends with the whole window", style="bold")
    ]
    parts += [Text(f"no answer: {watch.reason}", style="red")] if watch.silent else []
    if now is None:
        return Group(*parts, Text("waiting for the second scrape"))
    parts += [Text(f"the last {now.window_s or 0:.0f} s ({now.engine})"), unit_table(now)]
    parts += [Text(f"tokens/s: {_rates(now)}")]
    parts += [Text(line) for line in facts(now)]
    whole = watch.latest(len(watch.scrapes))
    if whole is not None and whole.scrapes > now.scrapes:
        parts += [Text(f"all {whole.window_s or 0:.0f} s", style="dim"), unit_table(whole)]
    return Group(*parts)


def _rates(found: Split) -> str:
    if not found.window_s:
        return "not known"
    parts = [f"{phase} {significant(part.value / found.window_s)}" for phase, part in _phases(found.tokens) if part]
    return ", ".join(parts) or "not known"


def live_line(watch: Watch) -> str:
    """The same in one line, where there is no terminal."""
    now = watch.latest(1)
    if watch.silent or now is None:
        return f"no answer: {watch.reason}" if watch.silent else "waiting for the second scrape"
    shares = [
        f"{name} {percent(unit.prefill_share)} prefill"
        for name, unit in (("tokens", now.tokens), ("request-s", now.request_s), ("engine-s", now.engine_s))
        if unit.prefill_share is not None
    ]
    running = f"; running {now.running.last:.0f}" if now.running is not None else ""
    return f"tokens/s: {_rates(now)}; {', '.join(shares) or 'no traffic'}{running}"
