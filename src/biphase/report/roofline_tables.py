"""What ``biphase roofline`` shows on a terminal: one screen for one model on one device, a table for several."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from biphase.report.terminal import PIPED_WIDTH
from biphase.roofline.fitting import Calibration
from biphase.roofline.sheet import PhaseRow, Sheet

POOR_FIT = 0.25  # median error of a calibrated law from which its constants are not to be trusted
WIDE = 140  # columns of a comparison, when the output is not a terminal


def print_sheets(sheets: Sequence[Sheet], console: Console | None = None) -> None:
    """One sheet as a screen, several as a comparison."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH if len(sheets) == 1 else WIDE
    console.print(sheet_view(sheets[0]) if len(sheets) == 1 else comparison(sheets))


def sheet_view(sheet: Sheet) -> RenderableType:
    """Can it fit, what limits each phase, the crossover, the floor and how to beat it."""
    parts: list[RenderableType] = [Text(_title(sheet), style="bold")]
    parts += [Text(f"note: {line}", style="yellow") for line in _warnings(sheet)]
    parts += [Text(line) for line in (*_model_lines(sheet), *_fit_lines(sheet))]
    parts += [_phase_table(sheet.phases), *(Text(line) for line in _crossover_lines(sheet))]
    parts += [Text(""), Text(_floor_line(sheet)), _lever_table(sheet)]
    parts += [Text(_share_heading(sheet)), _share_table(sheet)]
    parts.append(Text(_sources(sheet), style="dim"))
    return Group(*parts)


def comparison(sheets: Sequence[Sheet]) -> RenderableType:
    """One line for each model and device: fit, crossover, floor, and both phases."""
    shape = sheets[0].shape
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("model", "device"):
        table.add_column(heading, no_wrap=True, overflow="fold")
    for heading in ("weights\nGB", "largest\nbatch", "crossover\ntokens", "floor\nms/token", "floor\ntok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("prefill\nms, bound by", "decode\nms, bound by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for sheet in sheets:
        table.add_row(*_comparison_row(sheet))
    title = (
        f"prefill of {shape.prompt_tokens:,} tokens, decode of {shape.batch} at a context of {shape.context_tokens:,}"
    )
    notes = dict.fromkeys(f"note: {sheet.model.name}: {line}" for sheet in sheets for line in sheet.model.notes)
    lines = [Text(_comparison_caption(sheets), style="dim"), *(Text(note, style="yellow") for note in notes)]
    return Group(Text(title, style="bold"), table, *lines)


def _comparison_row(sheet: Sheet) -> list[str]:
    prefill, decode = _best(sheet)
    gpus = f"{sheet.device.gpus} x " if sheet.device.gpus > 1 else ""
    return [
        sheet.model.name,
        gpus + sheet.device.name,
        f"{sheet.model.weight_bytes / 1e9:,.1f}",
        _comparison_fit(sheet),
        _count(sheet.crossover_prompt_tokens),
        number(sheet.decode_floor_ms),
        f"{sheet.decode_floor_tokens_per_s_per_user:,.0f}",
        f"{number(prefill.step_ms)} {prefill.bound}",
        f"{number(decode.step_ms)} {decode.bound}",
    ]


def _comparison_fit(sheet: Sheet) -> str:
    if sheet.fits is None:
        return "memory?"
    if sheet.fits:
        return f"{sheet.capacities[0].sequences_most:,}"
    return f"no; tp {sheet.smallest_tp_that_fits}" if sheet.smallest_tp_that_fits else "no"


def _comparison_caption(sheets: Sequence[Sheet]) -> str:
    measured = sorted({s.device.name for s in sheets if s.lever_efficiency == "measured"})
    ideal = sorted({s.device.name for s in sheets if s.lever_efficiency == "ideal"})
    parts = ["Largest batch: whole sequences at the context, in theory. Floors and crossovers: at peak rates."]
    if measured:
        parts.append(f"Steps with measured constants: {', '.join(measured)}.")
    if ideal:
        parts.append(f"Steps at peak rates (no measured constants): {', '.join(ideal)}.")
    return " ".join(parts)


def _best(sheet: Sheet) -> tuple[PhaseRow, PhaseRow]:
    """Prefill and decode with measured constants where there are any."""
    return sheet.phases[-2], sheet.phases[-1]


def _title(sheet: Sheet) -> str:
    gpus = f"{sheet.device.gpus} x " if sheet.device.gpus > 1 else ""
    return f"{sheet.model.name} on {gpus}{sheet.device.name}"


def _warnings(sheet: Sheet) -> Iterator[str]:
    yield from sheet.model.notes
    if sheet.device.confidence == "low":
        yield f"the device's row has low confidence: {sheet.device.note or sheet.device.source}"
    longest = sheet.model.max_context_tokens
    asked = max(sheet.shape.prompt_tokens, sheet.shape.context_tokens)
    if longest is not None and asked > longest:
        yield f"{asked:,} tokens are more than the {longest:,} that the model is made for"
    if sheet.fits is False:
        yield "the weights do not fit: the times below are those of such a device with more memory"
    elif sheet.capacities and sheet.shape.batch > sheet.capacities[0].sequences_most:
        most = f"{sheet.capacities[0].sequences_most:,}"
        yield f"a batch of {sheet.shape.batch:,} does not fit (at most {most}): its times below are as if it did"


def _model_lines(sheet: Sheet) -> Iterator[str]:
    model = sheet.model
    formats = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in model.weight_bytes_by_format.items())
    yield (
        f"model    {model.parameters:,} parameters ({model.active_parameters_per_token / 1e9:.3f} B multiply a token); "
        f"weights {model.weight_bytes / 1e9:.2f} GB: {formats}"
    )
    state = (
        f", state {model.state_bytes_per_sequence / 1e6:.1f} MB a sequence" if model.state_bytes_per_sequence else ""
    )
    yield (
        f"KV       {model.kv_bytes_per_token / 1024:.1f} KiB a token if every layer keeps it; "
        f"{model.kv_bytes_at_context / 1e6:,.0f} MB for {sheet.shape.context_tokens:,} tokens{state}"
    )
    device = sheet.device
    peaks = ", ".join(f"{dtype} {peak:g}" for dtype, peak in device.peak_tflops.items())
    memory = "unknown" if device.memory_bytes is None else f"{device.memory_bytes / 1e9:.1f} GB"
    yield f"device   {peaks} TFLOP/s dense, {device.bandwidth_tbps:g} TB/s, memory {memory}"


def _fit_lines(sheet: Sheet) -> Iterator[str]:
    if sheet.fits is None or sheet.device.memory_bytes is None:
        yield "fit      the memory of this device is not in the table"
        return
    held = f"{sheet.weight_bytes_per_gpu / 1e9:.1f} GB, each device has {sheet.device.memory_bytes / 1e9:.1f} GB"
    if not sheet.fits:
        tp = sheet.smallest_tp_that_fits
        advice = f"the smallest split that fits is --tp {tp}" if tp else "fewer bytes a weight or more memory is needed"
        yield f"fit      NO: weights need {held}; {advice}"
        return
    rules = "; ".join(
        f"{c.rule} {_range(c.sequences_least, c.sequences_most)} ({_range(c.kv_tokens_least, c.kv_tokens_most)} tokens)"
        for c in sheet.capacities
    )
    yield f"fit      yes: weights need {held}"
    yield f"batch    sequences of {sheet.shape.context_tokens:,} tokens: {rules}"


def _range(least: int, most: int) -> str:
    return f"{most:,}" if least == most else f"{least:,}-{most:,}"


def _phase_table(rows: Sequence[PhaseRow]) -> Table:
    """A column for each phase and pricing, a line for each quantity."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("one step, each device", no_wrap=True)
    for row in rows:
        priced = {"ideal": "at peak", "measured": "measured"}[row.efficiency]
        table.add_column(f"{row.phase}, {priced}", justify="right")
    for name, cell in _QUANTITIES.items():
        table.add_row(name, *(cell(row) for row in rows))
    return table


_QUANTITIES: dict[str, Callable[[PhaseRow], str]] = {
    "FLOPs": lambda row: _scaled(row.flops),
    "bytes": lambda row: _scaled(_moved(row)),
    "intensity, FLOP/B": lambda row: number(row.intensity_flop_per_byte),
    "compute at peak, ms": lambda row: number(row.compute_ms),
    "memory at peak, ms": lambda row: number(row.memory_ms),
    "links, overhead, ms": lambda row: number(row.communication_ms + row.overhead_ms),
    "step, ms": lambda row: number(row.step_ms),
    "tokens/s": lambda row: f"{row.tokens_per_s:,.0f}",
    "MFU, MBU": lambda row: f"{row.mfu:.1%}, {row.mbu:.1%}",
    "bound by": lambda row: row.bound,
}


def _moved(row: PhaseRow) -> float:
    return row.weight_bytes + row.kv_read_bytes + row.kv_write_bytes + row.state_bytes


def _crossover_lines(sheet: Sheet) -> Iterator[str]:
    yield (
        f"crossover  a prompt is compute-bound from {_count(sheet.crossover_prompt_tokens)} tokens; ridge point "
        f"{sheet.ridge_flop_per_byte:.0f} FLOP/B ({sheet.matrices_run_as})"
    )
    measured = f", measured {_count(sheet.knee_tokens_measured)}" if sheet.knee_tokens_measured else ""
    yield f"knee       90 % of the attainable rate from {_count(sheet.knee_tokens_ideal)} tokens a step{measured}"
    parity = sheet.kv_outweighs_weights_at_context_tokens
    if parity is None:
        yield f"cache      never outweighs the weights at batch {sheet.shape.batch}: its layers keep a bounded part"
    else:
        yield f"cache      outweighs the weights from a context of {parity:,} tokens at batch {sheet.shape.batch}"


def _floor_line(sheet: Sheet) -> str:
    return (
        f"decode floor  {number(sheet.decode_floor_ms)} ms a token, "
        f"{sheet.decode_floor_tokens_per_s_per_user:,.0f} tokens/s a user: the active weights read once. "
        f"To beat it (priced at {'measured constants' if sheet.lever_efficiency == 'measured' else 'peak rates'}):"
    )


def _lever_table(sheet: Sheet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("way", "how"):
        table.add_column(heading)
    for heading in ("ms/token", "tok/s a user", "tok/s in all"):
        table.add_column(heading, justify="right")
    for lever in sheet.levers:
        how = lever.how or f"batch {sheet.shape.batch}, context {sheet.shape.context_tokens:,}"
        user, everyone = 1e3 / lever.ms_per_token, lever.tokens_per_s_all_users
        table.add_row(lever.way, how, number(lever.ms_per_token), f"{user:,.0f}", f"{everyone:,.0f}")
    return table


def _share_heading(sheet: Sheet) -> str:
    return "prefill's share of GPU time, by decode batch (it is set by the batch as much as by the shape):"


def _share_table(sheet: Sheet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload")
    table.add_column("prompt:output", justify="right")
    for batch in sheet.shares[0].prefill_share_by_batch:
        table.add_column(f"batch {batch}", justify="right")
    for row in sheet.shares:
        shape = f"{row.prompt_tokens}:{row.output_tokens}"
        table.add_row(row.workload, shape, *(f"{share:.0%}" for share in row.prefill_share_by_batch.values()))
    return table


def _sources(sheet: Sheet) -> str:
    device = sheet.device
    prices = "; ".join(f"{p.usd_per_hour:g} $/h ({p.provider}, {p.date})" for p in device.prices)
    confidence = f", confidence {device.confidence}" if device.confidence else ""
    return f"device data: {device.source}{confidence}" + (f"; prices seen: {prices}" if prices else "")


def print_calibration(found: Calibration, path: Path, before: float | None, console: Console | None = None) -> None:
    """What was measured on this machine; ``before``: bandwidth (bytes/s) of the file that was replaced."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("dtype", "library"):
        table.add_column(heading)
    for heading in ("peak GFLOP/s", "launch us", "eta (memory)", "mu (compute)", "median error of the law"):
        table.add_column(heading, justify="right")
    for one in found.calibrated:
        law = one.law
        cells = (number(one.peak_flops / 1e9), number(law.launch_s * 1e6), f"{law.memory:.2f}", f"{law.compute:.2f}")
        table.add_row(law.dtype, one.engine, *cells, f"{law.error:.0%}")
    console.print(Text(f"{found.hardware}; {found.software}", style="bold"))
    console.print(Text(f"read bandwidth  {found.bandwidth / 1e9:.1f} GB/s{_change(found.bandwidth, before)}"))
    console.print(table)
    for line in _calibration_notes(found):
        console.print(Text(f"note: {line}", style="yellow"))
    console.print(Text(f"took {found.seconds:.0f} s; written to {path}"), soft_wrap=True)


def _change(now: float, before: float | None) -> str:
    return "" if before is None else f" ({now / before - 1:+.0%} against the file it replaces)"


def _calibration_notes(found: Calibration) -> Iterator[str]:
    if found.foreign_cores is not None and found.foreign_cores > 0.1 * found.cores:
        yield (
            f"other processes kept {found.foreign_cores:.1f} of {found.cores} cores busy meanwhile: rates are too low, "
            "and another run may differ by more than 10 %; calibrate again on a quiet machine"
        )
    poor = [f"{one.law.dtype} ({one.engine})" for one in found.calibrated if one.law.error > POOR_FIT]
    if poor:
        yield f"the law misses half of the timings of {', '.join(poor)} by more than {POOR_FIT:.0%}"
    yield from found.skipped


def number(value: float) -> str:
    """About three significant digits, never in exponent form."""
    if value == 0:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f}"


def _count(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _scaled(value: float) -> str:
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value / 1e3:.1f} K"
