"""The ITL of every stream over time while a long prompt is prefilled: one picture for all servers, on the same axes."""

from collections.abc import Sequence
from html import escape

from biphase.analysis.stall_result import ServerStall
from biphase.report.plots import Scale, tick_text

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 960, 190, 64, 16, 34, 44
BEFORE = 0.08
"""Part of the time before the prompt, beside that of the longest prefill, that is shown; and after it."""


def stall_plot(servers: Sequence[ServerStall], itl_slo_ms: float | None) -> str:
    """An SVG with a panel for each server that has a timeline; there must be one."""
    shown = [s for s in servers if s.timeline is not None]
    span = max(s.timeline.prefill_s for s in shown if s.timeline)
    gaps = [ms for s in shown for ms in _visible(s, span)] + ([itl_slo_ms] if itl_slo_ms else [])
    x = Scale(-BEFORE * span, (1 + BEFORE) * span, LEFT, WIDTH - RIGHT)
    low, high = min(gaps) / 1.3, max(gaps) * 1.5
    height = TOP + len(shown) * PANEL + BOTTOM
    parts = []
    for number, server in enumerate(shown):
        top = TOP + number * PANEL
        y = Scale(max(low, high / 1e5), high, top + PANEL - 26, top, True)
        parts += [*_grid(x, y), *_prefill(server, x, y), *_streams(server, x, y), *_slo(itl_slo_ms, x, y)]
        parts.append(_text(LEFT, top - 8, _caption(server), "start"))
    parts += [*_time_ticks(x, height), *_titles(height)]
    name = "ITL of every stream while a long prompt is prefilled"
    # on a phone it is scrolled, not shrunk until nobody can read it
    start = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" style="min-width:680px">'
    return f"{start}<title>{name}</title>{''.join(parts)}</svg>"


def _visible(server: ServerStall, span: float) -> list[float]:
    assert server.timeline is not None
    ends = (-BEFORE * span, (1 + BEFORE) * span)
    streams = server.timeline.streams
    found = [
        ms for s in streams for end, ms in zip(s.end_s, s.gap_ms, strict=True) if ends[0] <= end <= ends[1] and ms > 0
    ]
    return found or [1.0]


def _caption(server: ServerStall) -> str:
    assert server.timeline is not None
    worst = max((ms for s in server.timeline.streams for ms in s.gap_ms), default=0.0)
    return f"{server.name}: worst gap {worst:,.0f} ms, TTFT of the prompt {1e3 * server.timeline.prefill_s:,.0f} ms"


def _prefill(server: ServerStall, x: Scale, y: Scale) -> list[str]:
    """The time from the prompt's sending to its first token, as a band."""
    assert server.timeline is not None
    start, end = x(0.0), x(server.timeline.prefill_s)
    band = f'x="{start:.1f}" y="{y.end:.1f}" width="{end - start:.1f}" height="{y.start - y.end:.1f}"'
    return [
        f'<rect class="fill1" style="opacity:.13" {band}/>',
        f'<line class="mark" x1="{start:.1f}" x2="{start:.1f}" y1="{y.start:.1f}" y2="{y.end:.1f}"/>',
        f'<line class="mark" x1="{end:.1f}" x2="{end:.1f}" y1="{y.start:.1f}" y2="{y.end:.1f}"/>',
        _text(start + 5, y.start - 6, "prefill of the prompt", "start"),
    ]


def _streams(server: ServerStall, x: Scale, y: Scale) -> list[str]:
    """A dash for each gap, as long as it lasted and as high as its ms; streams take turns with the colours."""
    assert server.timeline is not None
    found = []
    for number, stream in enumerate(server.timeline.streams):
        path = []
        for end, ms in zip(stream.end_s, stream.gap_ms, strict=True):
            left, right = max(end - ms / 1e3, x.low), min(end, x.high)
            if right > left and ms >= y.low:
                path.append(f"M{x(left):.1f} {y(ms):.1f}H{max(x(right), x(left) + 1):.1f}")
        if path:
            color = (0, 2, 3)[number % 3]  # colour 1 marks the prefill
            found.append(f'<path class="line{color}" style="stroke-width:1.6" d="{"".join(path)}"/>')
    return found


def _slo(itl_slo_ms: float | None, x: Scale, y: Scale) -> list[str]:
    if itl_slo_ms is None:
        return []
    at = f'x1="{x.start}" x2="{x.end}" y1="{y(itl_slo_ms):.1f}" y2="{y(itl_slo_ms):.1f}"'
    return [
        f'<line class="line1" style="stroke-width:1;stroke-dasharray:6 4" {at}/>',
        _text(x.end - 4, y(itl_slo_ms) - 4, f"wanted {itl_slo_ms:g} ms", "end"),
    ]


def _grid(x: Scale, y: Scale) -> list[str]:
    found = []
    for tick in y.ticks():
        at = f'{y(tick):.1f}"'
        found.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at} y2="{at}/>')
        found.append(_text(LEFT - 6, y(tick) + 4, tick_text(tick), "end"))
    for tick in x.ticks():
        found.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{y.start:.1f}" y2="{y.end:.1f}"/>')
    return found


def _time_ticks(x: Scale, height: float) -> list[str]:
    return [_text(x(tick), height - BOTTOM - 6, tick_text(tick), "middle") for tick in x.ticks()]


def _titles(height: float) -> list[str]:
    middle = (TOP + height - BOTTOM) / 2
    turned = f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, "gap between two chunks, ms", "middle")}</g>'
    return [_text((LEFT + WIDTH - RIGHT) / 2, height - 12, "seconds since the prompt was sent", "middle"), turned]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
