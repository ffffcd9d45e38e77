"""A stall as one HTML file that needs nothing else, in the style of all reports."""

from collections.abc import Callable, Iterator
from html import escape

from biphase.analysis.stall_result import StallResult
from biphase.report.page import document, figure
from biphase.report.plots import Axes, Series, plot
from biphase.report.stall_plot import stall_plot
from biphase.report.stall_table import HEADINGS, stall_cells
from biphase.report.stall_text import short_name, stall_conditions, stall_words, title


def stall_page(result: StallResult) -> str:
    """The whole document."""
    body = "\n".join(part for make in _SECTIONS for part in make(result))
    return document(title(result), body)


def _head(result: StallResult) -> Iterator[str]:
    yield f"<h1>{escape(title(result))}</h1>"
    for server in result.servers:
        name = f"{server.name}: {short_name(server)}"
        yield f'<p class="quiet">{escape(name)} · {escape(server.url)} · {escape(result.started)}</p>'
        if server.error is not None:
            yield f'<p class="warning"><b>{escape(server.name)} broke off:</b> {escape(server.error)}</p>'
        for v in server.verdicts:
            yield (
                f'<p class="warning"><b>{escape(server.name)}: {escape(v.name)}</b> {escape(v.sentence)}. '
                f"<i>What to do:</i> {escape(v.advice)}.</p>"
            )
    if result.servers and not any(s.verdicts or s.error for s in result.servers):
        yield '<p class="good">Nothing was seen that spoils the numbers.</p>'


def _table(result: StallResult) -> Iterator[str]:
    measured = [server for server in result.servers if server.attacks]
    if not measured:
        return
    yield '<div class="wide"><table><thead><tr>' + "".join(f"<th>{escape(h)}</th>" for h in HEADINGS)
    yield "</tr></thead><tbody>"
    for server in measured:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in stall_cells(server)) + "</tr>"
    yield "</tbody></table></div>"


def _picture(result: StallResult) -> Iterator[str]:
    if not any(server.timeline for server in result.servers):
        return
    caption = (
        "Each dash is one gap of one stream: as long as it lasted, as high as its milliseconds (logarithmic). For each "
        "server the repeat with the median worst gap. Before 0 the streams decode undisturbed."
    )
    svg = f'<div class="wide">{stall_plot(result.servers, result.itl_slo_ms)}</div>'
    yield figure("ITL of every stream over time", svg, caption, wide=True)


def _words(result: StallResult) -> Iterator[str]:
    for server in result.servers:
        for line in stall_words(server):
            yield f'<p class="words"><b>{escape(server.name)}</b> {escape(line)}</p>'


def _advice(result: StallResult) -> Iterator[str]:
    for server in result.servers:
        found = server.advice
        if found is None:
            continue
        gaps = Series("worst gap", [(float(n), gap) for n, gap, _ in found.curve], 0)
        waits = Series("TTFT of the prompt", [(float(n), wait) for n, _, wait in found.curve], 1)
        level = [(float(found.curve[end][0]), found.itl_slo_ms) for end in (0, -1)]
        wanted = Series(f"wanted, {found.itl_slo_ms:g} ms", level, 2, "dashes")
        best = found.chunk_tokens if found.found else None
        marks = [(f"{best.value:.0f}", best.value)] if best else []
        axes = Axes("tokens of the prompt in a chunk", "ms", True, True, marks)
        yield figure(
            f"{server.name}: what a chunk size costs",
            plot("Worst gap and TTFT over chunk size", axes, [gaps, waits, wanted]),
            f"By the measured prefill law and the quiet ITL, for a prompt of {found.prompt_tokens:,} tokens beside "
            f"{server.victims} streams. Dotted: the largest chunk that keeps the wanted ITL.",
        )


def _details(result: StallResult) -> Iterator[str]:
    lines = "".join(f"<li>{escape(line)}</li>" for line in stall_conditions(result))
    versions = " · ".join(f"{name} {version}" for name, version in result.versions.items())
    yield (
        f"<h2>Conditions</h2><ul>{lines}</ul><h2>Made by</h2>"
        f'<p class="command"><code>{escape(result.command)}</code></p><p>{escape(versions)}</p>'
    )


_SECTIONS: tuple[Callable[[StallResult], Iterator[str]], ...] = (_head, _table, _picture, _words, _advice, _details)
