"""The options of ``biphase bench``: their types and help, and from their text to a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from biphase.cli.ranges import LONGEST_S, check_range
from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.analysis.slo import Slo
    from biphase.client.traffic import Kind, Load
    from biphase.client.workloads import Workload
    from biphase.experiments.bench import BenchPlan, Laws

DEFAULT_CONCURRENCY = 4
MOST_CONCURRENCY = 100_000
MOST_WORKERS = 256
MOST_LEVEL = 1_000_000
"""Requests a second, or times a trace's speed: more than any client can send."""
SHORTEST_S = 0.1
MOST_REQUESTS = 10_000_000
"""Of a level; two at least, as the window that is measured ends where the last one is due."""

WorkloadName = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help="chat (512 tokens in, 512 out), conversation (1155/211), code (2048/28), summarise (2588/291), rag "
        "(8000/500), reasoning (500/8000); azure-conv, azure-code (traces of 2023), mooncake (a trace with shared "
        "prefixes); or a file, as docs/bench.md describes.",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(show_default=False, metavar="R[,R...]", help="Open loop: requests a second; several are a sweep."),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        show_default=str(DEFAULT_CONCURRENCY), metavar="N[,N...]", help="Closed loop: requests in flight; or a sweep."
    ),
]
TraceSpeed = Annotated[
    str | None,
    typer.Option(
        show_default="1 for a trace",
        metavar="X[,X...]",
        help="Open loop: the trace's own arrivals, X times as fast (gaps divided, no request left out).",
    ),
]
Arrivals = Annotated[Literal["poisson", "constant", "gamma"], typer.Option(help="How requests come at a --rate.")]
Burstiness = Annotated[
    float, typer.Option(help="Shape of gamma's intervals, as in vLLM's bench: below 1 requests bunch.")
]
Duration = Annotated[float, typer.Option(help="Seconds in which requests are due, of each level.")]
Requests = Annotated[
    int | None, typer.Option(show_default=False, metavar="N", help="Most requests of each level; may end it earlier.")
]
Warmup = Annotated[
    float | None,
    typer.Option(
        show_default="a tenth of the duration", metavar="SECONDS", help="Left out at the start of each level."
    ),
]
Drain = Annotated[float, typer.Option(help="Longest wait in seconds for what is in flight when a level's load ends.")]
SloText = Annotated[
    str | None,
    typer.Option(
        "--slo",
        show_default=False,
        metavar="LIMITS",
        help="Limits for each request: ttft=500ms,itl=50ms; also tpot and e2e. itl is the 99th percentile of a "
        "request's own gaps, tpot their mean.",
    ),
]
SloShare = Annotated[str, typer.Option(metavar="PERCENT", help="Part of the requests that must keep the SLO.")]
Search = Annotated[
    bool, typer.Option("--search", help="Find the highest rate (or trace speed) that keeps the SLO, from --rate on.")
]
Precision = Annotated[str, typer.Option(metavar="PERCENT", help="Of the search: how near the two rates must come.")]
Repeats = Annotated[int, typer.Option(help="Of the search: runs at each rate; the majority decides.")]
TooLong = Annotated[
    Literal["clip", "drop"],
    typer.Option(
        help="Requests that exceed the server's context: cut them to it, or leave them out; both are counted."
    ),
]
Workers = Annotated[
    int, typer.Option(help="Client processes that send and read; 0: this process alone. More for many streams.")
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        show_default=False,
        metavar="AMOUNT",
        help="What the server's machine costs an hour: prices a million input and a million output tokens.",
    ),
]
LawsFile = Annotated[
    Path | None,
    typer.Option(
        show_default=False,
        metavar="P.json",
        help="Of biphase profile --json: models engine-seconds for the price where the server does not count them; "
        "without it a short profile is made first.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(show_default=False, help="Of the arrivals; prompts are new in every run all the same.")
]


def make_loads(
    workload: "Workload",
    rate: str | None,
    concurrency: str | None,
    trace_speed: str | None,
    arrivals: "Kind",
    burstiness: float,
) -> "tuple[Load, ...]":
    """The levels of load; ``BadInput`` when two kinds are asked for, or what a workload cannot give."""
    from biphase.client.traffic import Load

    given = {"--rate": rate, "--concurrency": concurrency, "--trace-speed": trace_speed}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise BadInput(f"{' and '.join(named)}: one kind of load at a time")
    check_range("--burstiness", burstiness, 0.01, 1_000_000)
    if burstiness != 1.0 and (arrivals != "gamma" or rate is None):
        raise BadInput("--burstiness shapes gamma arrivals alone: add --rate R --arrivals gamma")
    if rate is not None:
        return tuple(Load(arrivals, level, burstiness) for level in _numbers("--rate", rate))
    if trace_speed is not None or (concurrency is None and workload.timed):
        if not workload.timed:
            raise BadInput(f"--trace-speed: the requests of {workload.name} have no time of arrival; use --rate")
        speeds = "1" if trace_speed is None else trace_speed
        return tuple(Load("trace", level) for level in _numbers("--trace-speed", speeds))
    in_flight = str(DEFAULT_CONCURRENCY) if concurrency is None else concurrency
    return tuple(Load("closed", level) for level in _whole("--concurrency", in_flight))


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value <= MOST_LEVEL for value in found):
        raise BadInput(
            f"{option} {text!r}: expected a number more than 0 and at most {MOST_LEVEL:,}, or several as in 1,2,4"
        )
    return found


def _whole(option: str, text: str) -> list[float]:
    found = _numbers(option, text)
    if any(value != int(value) or value > MOST_CONCURRENCY for value in found):
        raise BadInput(f"{option} {text!r}: expected whole numbers, 1 to {MOST_CONCURRENCY:,}")
    return found


def percent(option: str, text: str) -> float:
    """A part of one from a percentage. A bare number below 1 is refused: 0.95 would be read as 0.95 %."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value <= 100 or (value < 1 and number == text.strip()):
        raise BadInput(f"{option} {text!r}: expected a percentage, more than 0 and at most 100, as in 95%")
    return value / 100


def make_slo(text: str | None, share: str, search: bool) -> "Slo | None":
    """The limits; ``BadInput`` when a search has none."""
    from biphase.analysis.slo import parse_slo

    part = percent("--slo-share", share)
    if text is None and search:
        raise BadInput(
            "--search looks for the highest rate that keeps an SLO: give one, as in --slo ttft=500ms,itl=50ms"
        )
    return parse_slo(text, part) if text is not None else None


@dataclass(frozen=True)
class Times:
    """Seconds: in which requests are due, left out of them, waited for afterwards."""

    duration: float
    warmup: float | None
    drain: float

    def check(self) -> None:
        """``BadInput`` names the option that is out of range."""
        check_range("--duration", self.duration, SHORTEST_S, LONGEST_S, "seconds")
        if self.warmup is not None and not 0 <= self.warmup < self.duration:
            raise BadInput(
                f"--warmup {self.warmup:g}: expected seconds, 0 or more and less than --duration ({self.duration:g})"
            )
        check_range("--drain", self.drain, 0, LONGEST_S, "seconds")


@dataclass(frozen=True)
class Counts:
    """Most requests of a level, runs of a level in a search, client processes, the seed of the arrivals."""

    requests: int | None
    repeats: int
    workers: int
    seed: int | None

    def check(self) -> None:
        """``BadInput`` names the option that is out of range."""
        check_range("--requests", self.requests, 2, MOST_REQUESTS)
        if not 1 <= self.repeats <= 99 or self.repeats % 2 == 0:
            raise BadInput(f"--repeats {self.repeats}: expected an odd number, 1 to 99, so that a majority decides")
        check_range("--workers", self.workers, 0, MOST_WORKERS)
        if self.seed is not None and self.seed < 0:
            raise BadInput(f"--seed {self.seed}: expected a whole number, 0 or more")


@dataclass(frozen=True)
class Finding:
    """The limits, whether to look for the highest load that keeps them, and how near."""

    slo: "Slo | None"
    search: bool
    precision: str


def make_plan(
    workload: "Workload",
    loads: "Sequence[Load]",
    times: Times,
    counts: Counts,
    finding: Finding,
    clip: bool,
    per_hour: float | None,
    laws: Path | None,
) -> "BenchPlan":
    """What to run; ``BadInput`` names the option that is out of range."""
    from biphase.experiments.bench import BenchPlan, check_loads
    from biphase.experiments.load_run import Timing

    times.check()
    counts.check()
    if finding.search and (len(loads) > 1 or not loads[0].open):
        raise BadInput("--search begins at one --rate or --trace-speed and finds the others itself")
    check_range("--price-per-hour", per_hour, 1e-6, 1_000_000_000)
    if laws is not None and per_hour is None:
        raise BadInput("--laws models a price: add --price-per-hour")
    plan = BenchPlan(
        workload=workload,
        loads=tuple(loads),
        timing=Timing(times.duration, times.drain, counts.requests),
        slo=finding.slo,
        search=finding.search,
        precision=percent("--precision", finding.precision),
        repeats=counts.repeats,
        warmup_s=times.warmup,
        clip=clip,
        workers=counts.workers,
        per_hour=per_hour,
        laws=_laws(laws),
        seed=counts.seed,
    )
    check_loads(plan)
    return plan


def _laws(path: Path | None) -> "Laws":
    if path is None:
        return None, None
    from biphase.analysis.split_model import read_laws

    found = read_laws(path)
    return found.prefill_law, found.decode_law
