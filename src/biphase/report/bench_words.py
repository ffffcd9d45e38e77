"""A bench in sentences: the answer first, then how the load was made and what its numbers mean."""

from collections.abc import Iterator

from biphase.analysis.bench_result import BenchResult, LevelResult
from biphase.analysis.price import Price
from biphase.analysis.saturation import SaturationResult
from biphase.analysis.slo import ITL_PERCENT
from biphase.report.laws_text import significant


def answer(result: BenchResult) -> list[str]:
    """What an operator wants to know, in two to five sentences."""
    bench, shown = result.bench, result.bench.levels[result.bench.shown]
    found = [*_saturation(result)] if bench.saturation is not None else []
    found += [_level(shown, str(bench.slo) if bench.slo else None)]
    found += [line for line in (_limits(shown), *_price(shown.price)) if line]
    return found


def _saturation(result: BenchResult) -> Iterator[str]:
    found, slo = result.bench.saturation, result.bench.slo
    assert found is not None
    load = result.bench.levels[0].load
    kind = f"{load.kind} arrivals" if load.kind != "trace" else "times the trace's own speed"
    if found.highest is None and any(probe.client_limited for probe in found.probes):
        yield f"The search says nothing of the server: {found.ended}."
        return
    if found.highest is None:
        yield f"No rate keeps the SLO ({slo}): {found.ended}.{_nearest(found)}"
        return
    yield (
        f"The highest rate that keeps the SLO ({slo}) is {significant(found.highest)} {load.unit} ({kind})"
        + (f"; {significant(found.lowest_failing)} does not keep it." if found.lowest_failing else f": {found.ended}.")
    )


def _nearest(found: SaturationResult) -> str:
    if not found.probes:
        return ""
    slowest = min(found.probes, key=lambda probe: probe.level)
    ttft = f", TTFT p95 {significant(slowest.ttft_p95_ms)} ms" if slowest.ttft_p95_ms is not None else ""
    itl = f", ITL p99 {significant(slowest.itl_p99_ms)} ms" if slowest.itl_p99_ms is not None else ""
    return f" At {significant(slowest.level)}, the lowest tried: {slowest.why}{ttft}{itl}."


def _level(level: LevelResult, slo: str | None) -> str:
    flow, found = level.measured.flow, level.measured
    sentence = (
        f"Under {level.description} the server completed {significant(flow.completed)} requests/s, "
        f"{significant(flow.input_tokens)} input and {significant(flow.output_tokens)} output tokens/s"
    )
    if found.attainment is None or slo is None:
        return f"{sentence}."
    kept = found.attainment
    return (
        f"{sentence}; {kept.good} of {found.outcomes.due} requests ({100 * kept.all:.1f} %) kept the SLO ({slo}): "
        f"goodput {significant(flow.goodput or 0.0)} requests/s."
    )


def _limits(level: LevelResult) -> str | None:
    """Each limit by itself, where there is more than one."""
    kept = level.measured.attainment
    if kept is None or len(kept.by_limit) < 2:
        return None
    parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in kept.by_limit.items())
    return f"Kept by itself: {parts}; all at once {100 * kept.all:.1f} % (95 % interval {_interval(level)})."


def _interval(level: LevelResult) -> str:
    kept = level.measured.attainment
    return f"{100 * kept.low:.1f} to {100 * kept.high:.1f} %" if kept else ""


def _price(price: Price | None) -> Iterator[str]:
    if price is None:
        return
    how = "counted by the server" if price.phase_time.source == "measured" else "modelled, not measured"
    yield (
        f"At {price.per_hour:g} an hour a million input tokens cost {money(price.input_per_million)} and a million "
        f"output tokens {money(price.output_per_million)}, {significant(price.output_to_input)} times as much "
        f"(phase time {how})."
    )


def money(value: float) -> str:
    """Three significant digits, cents at least."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def conditions(result: BenchResult) -> Iterator[str]:
    """How the load was made and what each number means."""
    bench, profile = result.bench, result.profile
    shown = bench.levels[bench.shown]
    yield f"workload {bench.workload.name}: {bench.workload.source}"
    yield _window(shown)
    yield from _meaning(result)
    yield from _price_conditions(shown.price)
    yield _client(result)
    if profile.http_round_trip_ms is not None:
        yield (
            f"an HTTP round trip alone takes {profile.http_round_trip_ms.median:.2f} ms "
            f"(GET {profile.http_round_trip_path}, median of {profile.http_round_trip_ms.n})"
        )
    yield from profile.notes


def _window(level: LevelResult) -> str:
    found = level.measured
    return (
        f"steady state: {found.outcomes.due} requests that were due in a window of {found.window_s:.1f} s are "
        f"measured; the {found.before_s:.1f} s before it (warm-up) and the {level.drain_s:.1f} s after it (drain) are "
        f"left out, but their requests are waited for; on average {found.occupancy.mean:.3g} requests were in flight"
    )


def _meaning(result: BenchResult) -> Iterator[str]:
    yield (
        "TTFT, TPOT and E2E are from the sending of the request, one value a request; ITL are raw gaps, one a token, "
        "of all requests pooled"
    )
    if result.bench.slo is not None:
        yield (
            "the SLO counts ttft and e2e from the moment a request was due; itl is the "
            f"{ITL_PERCENT:g}th percentile of a request's own gaps, tpot their mean; a request that failed, was turned "
            "away or did not finish keeps no limit; goodput = requests due in the window that kept it / the window"
        )
    if result.bench.saturation is not None:
        found = result.bench.saturation
        votes = f"holds when most of {found.repeats} runs do" if found.repeats > 1 else "is run once"
        yield f"saturation: bracketed by doubling, then bisected to {100 * found.precision:g} %; a level {votes}"


def _price_conditions(price: Price | None) -> Iterator[str]:
    if price is None:
        return
    time = price.phase_time
    yield (
        f"price: {time.prefill_s:.3g} engine-seconds of prefill and {time.decode_s:.3g} of decode ({time.source}; "
        f"{time.how}) for {price.input_tokens:,} input ({price.cached_tokens:,} of them cached) and "
        f"{price.output_tokens:,} output tokens; the machine was {100 * price.busy:.0f} % busy. The whole bill is "
        f"split, idle time too; at full use: {money(price.input_at_full_use)} and {money(price.output_at_full_use)}"
    )


def _client(result: BenchResult) -> str:
    bench, shown = result.bench, result.bench.levels[result.bench.shown]
    flow, lag = shown.measured.flow, shown.measured.lag_ms
    rate = f"asked for {significant(flow.asked)}/s, sent {significant(flow.sent)}/s; " if flow.asked is not None else ""
    late = f"requests went out {lag.median:.2f} ms late (median; p99 {lag.p99:.2f} ms); " if lag is not None else ""
    who = f"{bench.workers} client processes" if bench.workers else "one client process"
    return f"client: {rate}{late}stamps lag by {shown.measured.client_lag_ms:.2f} ms at most; {who}"
