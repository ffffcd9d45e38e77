"""A profile as one HTML file that needs nothing else: no script, no network; dark and light, phone and paper."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files

from biphase.analysis.laws import DecodeLaw
from biphase.analysis.profile_result import LengthRow, ProfileResult
from biphase.report.laws_text import law_lines
from biphase.report.plots import Axes, Series, bars, plot
from biphase.report.tables import cell, conditions, findings, short_model, tokens_cell
from biphase.report.words import plain_words

STYLE = files("biphase.report").joinpath("page.css")
CURVE_POINTS = 60


def page(result: ProfileResult) -> str:
    """The whole document."""
    title = f"{short_model(result)}: prefill and decode"
    return document(title, "\n".join(part for make in _SECTIONS for part in make(result)))


def document(title: str, body: str) -> str:
    """A self-contained HTML document in the style of all reports; ``body`` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _head(result: ProfileResult) -> Iterator[str]:
    yield f"<h1>{escape(short_model(result))}</h1>"
    yield f'<p class="quiet">{escape(result.url)} · {escape(result.started)}</p>'
    if result.error is not None:
        yield f'<p class="warning"><b>The run broke off:</b> {escape(result.error)}</p>'
    for verdict in result.verdicts:
        yield (
            f'<p class="warning"><b>{escape(verdict.name)}</b> {escape(verdict.sentence)}. '
            f"<i>What to do:</i> {escape(verdict.advice)}.</p>"
        )
    if not result.verdicts and result.rows:
        yield '<p class="good">Nothing was seen that spoils the numbers.</p>'
    for line in plain_words(result):
        yield f'<p class="words">{escape(line)}</p>'


def _table(result: ProfileResult) -> Iterator[str]:
    heads = ("prompt tokens", "prefill ms", "prefill tok/s", "decode ms/token", "decode tok/s")
    yield (
        '<div class="wide"><table><thead><tr>' + "".join(f"<th>{head}</th>" for head in heads) + "</tr></thead><tbody>"
    )
    for row in result.rows:
        values = (row.ttft_ms, row.prefill_tok_per_s, row.decode_ms_per_token, row.decode_tok_per_s)
        cells = [tokens_cell(row), *map(cell, values)]
        yield "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>"
    yield "</tbody></table></div>"


def figure(heading: str, svg: str, caption: str, wide: bool = False) -> str:
    """A picture with its heading and what it shows; ``wide``: over both columns of the page."""
    start = '<figure style="grid-column: 1 / -1">' if wide else "<figure>"
    return f"{start}<h2>{escape(heading)}</h2>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _prefill(result: ProfileResult) -> Iterator[str]:
    rows, law, floor = result.rows, result.prefill_law, result.comparison
    if not rows:
        return
    measured = Series("measured, median", [(row.prompt_tokens, row.ttft_ms.median) for row in rows], 0, "dots")
    series, marks = [measured], _crossovers(result)
    lengths = _curve(rows)
    if law is not None:
        series.append(Series("fitted law", [(n, law.ms(n)) for n in lengths], 0))
    if floor is not None:
        series.append(Series("floor of the device", floor.prefill_floor_curve, 1, "dashes"))
    axes = Axes("prompt tokens", "time to first token, ms", True, True, marks)
    yield figure("Prefill: time", plot("TTFT over prompt length", axes, series), _prefill_caption(result))
    yield from _prefill_rate(rows, result.prefill_law.ms if result.prefill_law else None, marks)


def _prefill_rate(
    rows: Sequence[LengthRow], law: Callable[[float], float] | None, marks: Sequence[tuple[str, float]]
) -> Iterator[str]:
    points = [(row.prompt_tokens, row.prefill_tok_per_s.median) for row in rows if row.prefill_tok_per_s is not None]
    if not points:
        return
    series = [Series("measured, median", points, 0, "dots")]
    series += [Series("fitted law", [(n, 1e3 * n / law(n)) for n in _curve(rows)], 0)] if law else []
    axes = Axes("prompt tokens", "prefill, tokens/s", True, False, marks)
    yield figure(
        "Prefill: rate",
        plot("Prefill rate over prompt length", axes, series),
        "Prompt tokens computed per second until the first token. The rate rises while a pass costs the same whatever "
        "it holds, and falls again where attention takes its part.",
    )


def _curve(rows: Sequence[LengthRow]) -> list[float]:
    """Lengths at equal steps of the logarithm, from the shortest measured to the longest."""
    low, high = max(1, rows[0].prompt_tokens), max(2, rows[-1].prompt_tokens)
    return [low * (high / low) ** (i / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]


def _crossovers(result: ProfileResult) -> list[tuple[str, float]]:
    law, floor, longest = result.prefill_law, result.comparison, result.rows[-1].prompt_tokens
    marks = []
    if law is not None and law.crossover_tokens is not None and 1 <= law.crossover_tokens.value <= longest:
        marks.append((f"measured {law.crossover_tokens.value:.0f}", law.crossover_tokens.value))
    if floor is not None and floor.computed_crossover_tokens and floor.computed_crossover_tokens <= longest:
        at = float(floor.computed_crossover_tokens)
        marks.append((f"computed {at:.0f}", at))
    return marks


def _prefill_caption(result: ProfileResult) -> str:
    law = result.prefill_law
    http = f", {law.http_ms:.2g} ms of it HTTP" if law is not None and law.http_ms is not None else ""
    lines = " Dotted: crossovers in tokens, where the price of a pass and that of its tokens are equal."
    ridge = f" Ridge point {result.comparison.ridge_flop_per_byte:.0f} FLOP/B." if result.comparison else ""
    return (
        f"One request at a time; what a client sees{http}. Both axes are logarithmic."
        f"{lines if _crossovers(result) else ''}{ridge}"
    )


def _decode(result: ProfileResult) -> Iterator[str]:
    rows = [(row.prompt_tokens, row.decode_ms_per_token) for row in result.rows if row.decode_ms_per_token is not None]
    law = result.decode_law
    if rows:
        middle = (result.tokens - 1) / 2
        series = [Series("measured, one stream", [(n + middle, s.median) for n, s in rows], 2, "dots")]
        if law is not None:
            contexts = [law.longest_context * i / 40 for i in range(41)]
            series += [_decode_curve(law, b, contexts, 2 + i % 2) for i, b in enumerate((1, max(law.batches)))][
                : len(law.batches)
            ]
        if result.comparison is not None and result.comparison.decode_floor_ms and result.comparison.context_tokens:
            floor = result.comparison
            series.append(
                Series(
                    "floor of the device",
                    [(0.0, _weights_ms(result)), (float(floor.context_tokens or 0), floor.decode_floor_ms or 0.0)],
                    1,
                    "dashes",
                )
            )
        axes = Axes("context of each stream, tokens", "ms a token")
        caption = "A stream gets one token a step; lines are the fitted law, also where not measured."
        yield figure("Decode: ITL over context", plot("ITL over context", axes, series), caption)
    if law is not None and law.w_ms_per_sequence is not None:
        yield _decode_by_batch(law)


def _weights_ms(result: ProfileResult) -> float:
    parts = result.comparison.parts if result.comparison else ()
    return next((part.ms for part in parts if part.name.startswith("weights")), 0.0)


def _decode_curve(law: DecodeLaw, batch: int, contexts: Sequence[float], color: int) -> Series:
    return Series(f"fitted law, {batch} stream{'s' * (batch > 1)}", [(c, law.ms(batch, c)) for c in contexts], color)


def _decode_by_batch(law: DecodeLaw) -> str:
    context = law.shortest_context
    batches = [1 + i * (max(law.batches) - 1) / 40 for i in range(41)]
    points = [(float(b), law.ms(b, c) / (1 - r / 100)) for b, c, r in law.residuals]
    series = [
        Series("measured stretches, any context", points, 2, "dots"),
        Series(f"fitted law, context {context:.0f}", [(b, law.ms(b, context)) for b in batches], 2),
    ]
    caption = "Streams that decode together share the read of the weights; the slope is the price of one more."
    return figure("Decode: ITL over batch", plot("ITL over batch", Axes("streams", "ms a step"), series), caption)


def _gaps(result: ProfileResult) -> Iterator[str]:
    found = result.itl_ms
    if found is None or not found.histogram:
        return
    points = [(edge, float(count)) for low, high, count in found.histogram for edge in (low, high)]
    axes = Axes("inter-token latency, ms", "tokens", True)
    yield figure(
        "Decode: distribution of the gaps",
        plot("Distribution of inter-token latencies", axes, [Series("tokens", points, 3)]),
        f"{found.n} gaps, none averaged: median {found.median:.3g} ms, p99 {found.p99:.3g} ms, "
        f"worst gap {found.worst_gap:.3g} ms.",
    )


def _breakdown(result: ProfileResult) -> Iterator[str]:
    floor = result.comparison
    if floor is not None and floor.parts:
        parts = [(part.name, part.ms, part.source) for part in floor.parts]
        where = f"One stream at a context of {floor.context_tokens} tokens; {floor.model} on {floor.device}."
        yield figure("Where a decode step goes", bars("Parts of a decode step", parts, "ms"), where)
    elif result.decode_law is not None:
        yield figure(
            "Where a decode step goes", bars("Parts of a decode step", _parts(result.decode_law), "ms"), _NO_GPU
        )


_NO_GPU = (
    "From the fitted law, one stream. With --model-config and --gpu the weights' and the cache's floors are told apart."
)


def _parts(law: DecodeLaw) -> list[tuple[str, float, str]]:
    found = [("fixed, weights among it", law.t0_ms.value, "measured")]
    found += [("per sequence", law.w_ms_per_sequence.value, "measured")] if law.w_ms_per_sequence else []
    by_context = law.k_ms_per_token.value * law.longest_context if law.k_ms_per_token else 0.0
    return [*found, (f"attention to {law.longest_context:.0f} tokens", by_context, "measured")]


def _details(result: ProfileResult) -> Iterator[str]:
    yield "<h2>Laws and conditions</h2><ul>"
    for line in (*(findings(result) if result.rows else ()), *law_lines(result), *conditions(result)):
        yield f"<li>{escape(line)}</li>"
    for out in result.left_out:
        yield f"<li>left out: {out.prompt_tokens} tokens: {escape(out.reason)}</li>"
    versions = " · ".join(f"{name} {version}" for name, version in result.versions.items())
    yield f'</ul><h2>Made by</h2><p class="command"><code>{escape(result.command)}</code></p><p>{escape(versions)}</p>'


_SECTIONS: tuple[Callable[[ProfileResult], Iterator[str]], ...] = (
    _head,
    _table,
    _prefill,
    _decode,
    _gaps,
    _breakdown,
    _details,
)
