"""``biphase bench``: realistic traffic against a server, goodput under an SLO, the rate at which it saturates."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from biphase import __version__
from biphase.cli import bench_options as options
from biphase.cli import profile_options as common
from biphase.cli.outputs import check_outputs, deliver
from biphase.cli.targets import found_server, one_interrupt, server_address, start_engine
from biphase.errors import BadInput, RunFailed
from biphase.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from biphase.analysis.bench_result import BenchResult
    from biphase.client.endpoint import Access
    from biphase.client.record import Keep
    from biphase.experiments.bench import BenchPlan


def bench(
    url: common.Url = None,
    workload: options.WorkloadName = "chat",
    rate: options.Rate = None,
    concurrency: options.Concurrency = None,
    trace_speed: options.TraceSpeed = None,
    arrivals: options.Arrivals = "poisson",
    burstiness: options.Burstiness = 1.0,
    duration: options.Duration = 60.0,
    requests: options.Requests = None,
    warmup: options.Warmup = None,
    drain: options.Drain = 60.0,
    slo: options.SloText = None,
    slo_share: options.SloShare = "95%",
    search: options.Search = False,
    precision: options.Precision = "10%",
    repeats: options.Repeats = 3,
    too_long: options.TooLong = "clip",
    workers: options.Workers = 0,
    price_per_hour: options.PricePerHour = None,
    laws: options.LawsFile = None,
    seed: options.Seed = None,
    model: common.Model = None,
    json: common.Json = None,
    html: common.Html = None,
    records: common.Records = None,
    api_key: common.ApiKey = None,
    header: common.Header = None,
    ca: common.Ca = None,
    timeout: common.Timeout = 300.0,
    tokenizer: common.Tokenizer = None,
    dtype: common.Dtype = None,
    random_weights: common.RandomWeights = False,
) -> None:
    """Send realistic traffic to any OpenAI-compatible server, or to the built-in engine: goodput, saturation, price."""
    from biphase.client.workloads import find_workload

    traffic = find_workload(workload)
    loads = options.make_loads(traffic, rate, concurrency, trace_speed, arrivals, burstiness)
    times = options.Times(duration, warmup, drain)
    counts = options.Counts(requests, repeats, workers, seed)
    finding = options.Finding(options.make_slo(slo, slo_share, search), search, precision)
    plan = options.make_plan(traffic, loads, times, counts, finding, too_long == "clip", price_per_hour, laws)
    access = common.make_access(api_key, header or [], timeout, ca)
    engine_options = [*(["--dtype", dtype] if dtype else []), *(["--random-weights"] if random_weights else [])]
    if url is not None:
        url, access = server_address(url, access, engine_options)
    if tokenizer is not None and workers:
        raise BadInput("--tokenizer counts in this process alone: leave --workers away")
    check_outputs(json=json, html=html, records=records)
    with one_interrupt() as exit_status:
        try:
            with ExitStack() as stack:
                result = _run(stack, url, model, plan, access, engine_options, records, tokenizer)
            _report(result, json, html)
        except KeyboardInterrupt:
            raise typer.Exit(exit_status()) from None


def _run(
    stack: ExitStack,
    url: str | None,
    model: str | None,
    plan: "BenchPlan",
    access: "Access",
    engine_options: list[str],
    records: Path | None,
    tokenizer: str | None,
) -> "BenchResult":
    """Load ``url``, or the built-in engine, which ends with the stack."""
    from msgspec.structs import replace

    from biphase.cli.local_tokenizer import load_tokenizer
    from biphase.client import clock
    from biphase.client.record import open_records
    from biphase.client.tokenize import LocalTokenizer
    from biphase.experiments.bench import measure
    from biphase.report.progress import display

    local = LocalTokenizer(load_tokenizer(tokenizer)) if tokenizer else None
    keep: Keep = stack.enter_context(open_records(records)) if records else lambda record: None
    shown = stack.enter_context(display())
    engine = None
    if url is None:
        engine = start_engine(stack, model or DEFAULT_MODEL, engine_options, shown)
        url, model = engine.url, engine.model
    elif url == "local":
        url = found_server(access, shown)
    shown.status(f"asking {url} what it serves")
    command = common.shown_command()
    result = clock.run(measure(url, model, access, plan, keep, shown.step, __version__, command, local))
    death = engine.death() if engine and result.profile.error else None
    return replace(result, profile=replace(result.profile, error=death)) if death else result


def _report(result: "BenchResult", json: Path | None, html: Path | None) -> None:
    """Tables on stdout and files, also of a run that broke off; then its error, if there is one."""
    from biphase.experiments.facts import INTERRUPTED
    from biphase.report.bench_files import bench_json
    from biphase.report.bench_tables import print_bench

    deliver(lambda: print_bench(result), (json, lambda: bench_json(result)), (html, lambda: _page(result)))
    if result.profile.error == INTERRUPTED:
        raise KeyboardInterrupt
    if result.profile.error is not None:
        raise RunFailed(result.profile.error)


def _page(result: "BenchResult") -> str:
    from biphase.report.bench_page import bench_page  # only where it is asked for: it loads the plots

    return bench_page(result)
