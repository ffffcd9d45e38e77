"""Bench: what a server does under realistic traffic, at one load, at several, or at the highest that keeps an SLO."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from biphase.analysis.bench_result import (
    Analysis,
    Bench,
    BenchResult,
    LevelResult,
    LevelRun,
    analyse_level,
    as_profile,
    choose,
    window_of,
)
from biphase.analysis.bench_verdicts import run_verdicts
from biphase.analysis.goodput import REFUSED_STATUS
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.price import phase_time
from biphase.analysis.saturation import Search, judge
from biphase.analysis.slo import Slo
from biphase.analysis.verdicts import Verdict
from biphase.client.endpoint import Access
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Call, request
from biphase.client.record import Keep, Record, RunFacts
from biphase.client.scrape import scrape
from biphase.client.tokenize import LocalTokenizer
from biphase.client.traffic import CallMaker, Fitter, Load, check_size, recorded
from biphase.client.workers import SendCall, worker_pool
from biphase.client.workloads import Workload, describe
from biphase.errors import BadInput, BiphaseError, RunFailed
from biphase.experiments.bench_laws import measure_laws
from biphase.experiments.facts import INTERRUPTED, foreign_tokens, run_facts
from biphase.experiments.load_run import Level, LevelRunner, Progress, Timing, interrupted

FEWEST_IN_PROBE = 20
MOST_STRETCHED = 5.0
"""Requests that a run of the search should have, and how many times the duration it may take for them."""

Laws = tuple[PrefillLaw | None, DecodeLaw | None]


@dataclass(frozen=True)
class BenchPlan:
    """What to send and what to judge it by. ``loads``: one level each; with ``search`` the first is where the search
    begins. ``warmup_s`` None: a tenth of the time in which requests are due. ``workers``: client processes beside this
    one, 0 sends from this one. ``laws``: of an earlier profile, to model engine-seconds by."""

    workload: Workload
    loads: tuple[Load, ...]
    timing: Timing
    slo: Slo | None = None
    search: bool = False
    precision: float = 0.1
    repeats: int = 3
    warmup_s: float | None = None
    clip: bool = True
    workers: int = 0
    per_hour: float | None = None
    laws: Laws = (None, None)
    seed: int | None = None


def check_loads(plan: BenchPlan) -> None:
    """``BadInput`` where a level is too much to be prepared, or where no request can be expected to be measured."""
    timing = plan.timing
    longest = timing.duration_s * (MOST_STRETCHED if plan.search else 1.0)
    for load in plan.loads:
        check_size(plan.workload, load, timing.duration_s, timing.most)
        expected = expected_in_window(plan.workload, load, longest, plan.warmup_s)
        if expected is not None and expected < 1:
            raise BadInput(
                f"{load}: {expected:.2g} requests are to be expected in the {timing.duration_s:g} s of a level after "
                "its warm-up; raise it, or --duration"
            )


def expected_in_window(workload: Workload, load: Load, duration_s: float, warmup_s: float | None) -> float | None:
    """Requests of an open loop that are due in the part of a level that is measured; None in a closed loop."""
    if load.kind == "closed":
        return None
    moments = recorded(workload, load.level, duration_s) if load.kind == "trace" else [duration_s]
    window = window_of(LevelRun(load, (), 0.0, moments[-1]), warmup_s)
    return sum(map(window.holds, moments)) if load.kind == "trace" else load.level * window.seconds


async def measure(
    url: str,
    model: str | None,
    access: Access,
    plan: BenchPlan,
    keep: Keep,
    progress: Progress,
    version: str,
    command: Sequence[str] = (),
    tokenizer: LocalTokenizer | None = None,
) -> BenchResult:
    """Run the load against the server at ``url``; every record, and the facts of the run, go to ``keep`` as they come.

    Raises ``RunFailed`` or ``BadInput`` when the server cannot be asked or no request was due after the warm-up. A run
    that breaks off later, or is interrupted, gives what was measured until then, with ``error`` set.
    """
    async with open_target(url, model, access, tokenizer) as target, _sender(target, plan.workers, access) as send:
        before = await scrape(target.session, target.api)
        mean_output = round(describe(plan.workload).mean_output_tokens)
        facts = run_facts(target, mean_output, 1, version, command, before)
        keep(facts)
        run = BenchRun(target, plan, send, keep, progress)
        error = None
        try:
            await run.run()
            # of what was given up the server has counted tokens that no record holds
            whole = all(record.error is None or record.status in REFUSED_STATUS for record in run.counted)
            foreign = await foreign_tokens(target, before, run.counted) if whole else None
            facts = replace(facts, foreign_tokens=foreign)
        except BiphaseError as failure:
            if isinstance(failure, BadInput) and not run.levels:
                raise
            error = str(failure)
        except asyncio.CancelledError:
            error = INTERRUPTED
            run.break_off()
        facts = replace(facts, error=error)
        keep(facts)
        return run.result(facts)


@asynccontextmanager
async def _sender(target: Target, workers: int, access: Access) -> AsyncIterator[SendCall]:
    """How calls go out: from this process, or from others."""
    if workers:
        async with worker_pool(workers, access) as pool:
            yield pool
        return

    async def send(call: Call, moment: float | None) -> Record:
        return await target.counted(await request(target.session, call, moment))

    yield send


@dataclass
class BenchRun:
    """A run in progress: what was measured is there at any time, also after a failure."""

    target: Target
    plan: BenchPlan
    send: SendCall
    keep: Keep
    progress: Progress
    runs: list[LevelRun] = field(default_factory=list)
    levels: list[LevelResult] = field(default_factory=list)
    before: list[Record] = field(default_factory=list)
    laws: Laws = (None, None)
    search: Search | None = None

    def __post_init__(self) -> None:
        plan, target = self.plan, self.target
        self.laws = plan.laws
        self.fitter = Fitter(target.api.max_model_len, target.prompts.shortest, plan.clip)
        rng = random.Random(plan.seed)
        self.runner = LevelRunner(plan.workload, self.fitter, self.send, self.keep, self.progress, rng)

    @property
    def counted(self) -> list[Record]:
        """All records of the run."""
        return [*self.before, *(record for run in self.runs for record in run.records)]

    @property
    def analysis(self) -> Analysis:
        """What levels are judged by."""
        plan = self.plan
        return Analysis(plan.slo, plan.warmup_s, plan.workload.shares, plan.per_hour, self.laws)

    async def run(self) -> None:
        """The laws where a price must be modelled, then the levels; raises ``RunFailed`` when the server is gone."""
        if self.plan.per_hour is not None and self.laws == (None, None) and not await self._tells_engine_seconds():
            self.laws, self.before = await measure_laws(self.target, self.plan.workload, self.keep, self.progress)
        if self.plan.search:
            await self._search()
        else:
            for load in self.plan.loads:
                await self._level(load, self.plan.timing)

    async def _tells_engine_seconds(self) -> bool:
        found = await scrape(self.target.session, self.target.api)
        return found is not None and phase_time(found, found) is not None

    async def _search(self) -> None:
        plan, load = self.plan, self.plan.loads[0]
        assert plan.slo is not None
        self.search = Search(load.level, plan.precision, plan.repeats)
        while (level := self.search.next) is not None:
            found = await self._level(replace(load, level=level), self._stretched(load, level))
            if found is None:
                raise RunFailed(f"no request was due after the warm-up at {level:.3g} {load.unit}: raise --duration")
            self.search.add(judge(level, found.measured, plan.slo))

    def _stretched(self, load: Load, level: float) -> Timing:
        """Longer at a low rate, for as many requests as say something."""
        timing = self.plan.timing
        if load.kind == "trace" or timing.most is not None:
            return timing
        wanted = FEWEST_IN_PROBE / level / 0.9
        return Timing(min(max(timing.duration_s, wanted), MOST_STRETCHED * timing.duration_s), timing.drain_s)

    async def _level(self, load: Load, timing: Timing) -> LevelResult | None:
        number = f"level-{len(self.runs) + 1}"
        make = CallMaker(self.target.dialect, self.target.prompts, self.plan.workload, number)
        before = await scrape(self.target.session, self.target.api)
        level = await self.runner.run(load, timing, make)
        after = await scrape(self.target.session, self.target.api) if before is not None and not level.gone else None
        time = phase_time(before, after) if before is not None and after is not None else None
        found = self._add(LevelRun(load, level.records, level.began, level.ended, time, level.drained))
        if level.gone is not None:
            good = sum(record.error is None for run in self.runs for record in run.records)
            raise RunFailed(f"the server is gone after {good} good requests: {level.gone}")
        return found

    def _add(self, run: LevelRun) -> LevelResult | None:
        self.runs.append(run)
        found = analyse_level(run, self.analysis)
        if found is None:
            self.runs.pop()
        else:
            self.levels.append(found)
        return found

    def break_off(self) -> None:
        """Keep what the level in progress has measured."""
        level: Level | None = self.runner.level
        if level is not None and level.records and all(level.records is not run.records for run in self.runs):
            level = interrupted(level)
            self._add(LevelRun(level.load, level.records, level.began, level.ended, None, level.drained))

    def result(self, facts: RunFacts) -> BenchResult:
        """All that was found; ``RunFailed`` where nothing was."""
        if not self.levels:
            raise RunFailed(facts.error or "no request was due after the warm-up: raise --duration, or lower --warmup")
        plan = self.plan
        found = self.search.result(facts.error) if self.search else None
        shown = choose(self.levels, plan.slo, found.highest if found else None)
        if facts.error is None and not any(level.measured.outcomes.completed for level in self.levels):
            errors = next((list(level.measured.errors) for level in self.levels if level.measured.errors), [])
            why = errors[0] if errors else f"none ended within the drain of {plan.timing.drain_s:g} s (--drain)"
            facts = replace(facts, error=f"no request was completed: {why}")
        profile = as_profile(facts, self.runs[shown], self.levels[shown], self.analysis, self._verdicts(facts))
        bench = Bench(
            workload=describe(plan.workload),
            fitted=self.fitter.fitted,
            slo=plan.slo,
            levels=tuple(self.levels),
            shown=shown,
            saturation=found,
            workers=plan.workers,
            duration_s=plan.timing.duration_s,
        )
        return BenchResult(profile, bench)

    def _verdicts(self, facts: RunFacts) -> list[Verdict]:
        own = sum(record.completion_tokens or 0 for record in self.counted)
        return list(run_verdicts(self.fitter.fitted, self.runner.sent, facts.foreign_tokens, own, facts.busy_before))
