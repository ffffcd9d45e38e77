"""The options of ``biphase bench``: their types and help, and from their text to a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.analysis.slo import Slo
    from biphase.client.traffic import Kind, Load
    from biphase.client.workloads import Workload
    from biphase.experiments.bench import BenchPlan, Laws

DEFAULT_CONCURRENCY = 4
MOST_CONCURRENCY = 100_000
MOST_WORKERS = 256

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
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise BadInput(f"--burstiness {burstiness:g}: expected a number more than 0")
    if burstiness != 1.0 and (arrivals != "gamma" or rate is None):
        raise BadInput("--burstiness shapes gamma arrivals alone: add --rate R --arrivals gamma")
    if rate is not None:
        return tuple(Load(arrivals, level, burstiness) for level in _numbers("--rate", rate))
    if trace_speed is not None or (concurrency is None and workload.timed):
        if not workload.timed:
            raise BadInput(f"--trace-speed: the requests of {workload.name} have no time of arrival; use --rate")
        return tuple(Load("trace", level) for level in _numbers("--trace-speed", trace_speed or "1"))
    return tuple(Load("closed", level) for level in _whole("--concurrency", concurrency or str(DEFAULT_CONCURRENCY)))


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        raise BadInput(f"{option} {text!r}: expected a number more than 0, or several as in 1,2,4")
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
        if not (math.isfinite(self.duration) and self.duration > 0):
            raise BadInput(f"--duration {self.duration:g}: expected seconds, more than 0")
        if self.warmup is not None and not 0 <= self.warmup < self.duration:
            raise BadInput(
                f"--warmup {self.warmup:g}: expected seconds, 0 or more and less than --duration ({self.duration:g})"
            )
        if not (math.isfinite(self.drain) and self.drain >= 0):
            raise BadInput(f"--drain {self.drain:g}: expected seconds, 0 or more")


@dataclass(frozen=True)
class Counts:
    """Most requests of a level, runs of a level in a search, client processes, the seed of the arrivals."""

    requests: int | None
    repeats: int
    workers: int
    seed: int | None

    def check(self) -> None:
        """``BadInput`` names the option that is out of range."""
        if self.requests is not None and self.requests < 1:
            raise BadInput(f"--requests {self.requests}: expected 1 or more")
        if not 1 <= self.repeats <= 99 or self.repeats % 2 == 0:
            raise BadInput(f"--repeats {self.repeats}: expected an odd number, 1 to 99, so that a majority decides")
        if not 0 <= self.workers <= MOST_WORKERS:
            raise BadInput(f"--workers {self.workers}: expected 0 to {MOST_WORKERS}")


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
    from biphase.experiments.bench import BenchPlan
    from biphase.experiments.load_run import Timing

    times.check()
    counts.check()
    if finding.search and (len(loads) > 1 or not loads[0].open):
        raise BadInput("--search begins at one --rate or --trace-speed and finds the others itself")
    if per_hour is not None and not (math.isfinite(per_hour) and per_hour > 0):
        raise BadInput(f"--price-per-hour {per_hour:g}: expected an amount more than 0")
    if laws is not None and per_hour is None:
        raise BadInput("--laws models a price: add --price-per-hour")
    return BenchPlan(
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


def _laws(path: Path | None) -> "Laws":
    if path is None:
        return None, None
    from biphase.analysis.split_model import read_laws

    found = read_laws(path)
    return found.prefill_law, found.decode_law
