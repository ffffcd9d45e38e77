"""Split: which phase a server's live traffic needs, from its metrics over a window of time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from biphase.analysis.phase_split import Split, longest, recognised, split, windows, with_engine_seconds
from biphase.analysis.split_engines import Engine, explain_unknown, impossible, recognise
from biphase.analysis.split_meaning import meaning
from biphase.analysis.split_model import Laws, modelled_engine_seconds
from biphase.analysis.split_verdicts import Circumstances, circumstances, split_verdicts
from biphase.analysis.split_window import Window
from biphase.analysis.verdicts import Verdict
from biphase.client.endpoint import Access, connect
from biphase.client.failures import explain_status
from biphase.client.metrics_page import find_page
from biphase.client.scrape import NoPageError, Scrape, fetch
from biphase.client.scrape_files import KeepScrape, read_scrapes
from biphase.errors import BadInput, RunFailed
from biphase.redaction import redacted

INTERRUPTED = "interrupted"
LAST_SCRAPE_S = 2.0
MOST_SCRAPES = 2000
"""Kept of an unlimited watch; then every second one is let go, so that memory stays and the window grows."""


class SplitResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A split, what spoils it and what it means. In the JSON the fields of ``split`` stand at the top level."""

    biphase: str
    command: str
    url: str
    split: Split
    verdicts: tuple[Verdict, ...]
    meaning: tuple[Verdict, ...]
    error: str | None = None


@dataclass(frozen=True)
class SplitPlan:
    """How long to watch (seconds, None without end) and how often to look (seconds)."""

    seconds: float | None
    every: float


@dataclass(frozen=True)
class Origin:
    """What a result says of how it was made; ``laws`` model engine-seconds where the engine does not tell them."""

    version: str
    command: str = ""
    laws: Laws | None = None


Show = Callable[["Watch"], None]
"""Told after each scrape, also after one without an answer."""
Look = Callable[[], Awaitable[None]]
"""Asks the server once and tells the watch."""


class Watch:
    """The scrapes of one server so far; ``failed`` and ``reason`` tell of those without an answer."""

    def __init__(self, url: str, origin: Origin, plan: SplitPlan) -> None:
        self.url = url
        self.origin = origin
        self.plan = plan
        self.scrapes: list[Scrape] = []
        self.failed = 0
        self.reason = ""
        self.silent = False  # the last scrape had no answer
        self.cut = 0  # files whose last scrape is not whole

    def add(self, one: Scrape) -> None:
        """Keep a scrape."""
        self.silent = False
        self.scrapes.append(one)
        if len(self.scrapes) > MOST_SCRAPES:
            self.scrapes = [*self.scrapes[:-1:2], self.scrapes[-1]]

    def miss(self, reason: str) -> None:
        """Note that a scrape got no answer."""
        self.silent = True
        self.failed += 1
        self.reason = reason

    @property
    def engine(self) -> Engine | None:
        """The engine that these scrapes are of."""
        return recognised(self.scrapes)

    def unusable(self, one: Scrape) -> str | None:
        """Why a scrape is none of this server's: it holds what cannot be, or nothing of what the engine showed before.

        Taken as a scrape it would be a restart, of which nobody knows.
        """
        engine = recognise(one)
        if engine is None:
            return explain_unknown(one) if self.engine is not None else None
        return impossible(engine, one)

    def latest(self, scrapes: int) -> Split | None:
        """The split of the last few scrapes of the server as it runs now; None before there are two."""
        engine = self.engine
        if engine is None:
            return None
        window = windows(engine, self.scrapes[-scrapes - 1 :])[-1]
        return self._modelled(split(engine, window)) if len(window.scrapes) > 1 else None

    def result(self, error: str | None = None) -> SplitResult:
        """The split of everything so far; ``RunFailed`` where there is no window of two scrapes."""
        if self.silent and error is None:
            error = f"{self.reason}; the split is of what was scraped before"
        engine = self.engine
        if engine is None:
            raise RunFailed(error or f"{self.url}: {explain_unknown(self.scrapes[-1])}")
        stretches = windows(engine, self.scrapes)
        chosen = longest(stretches)
        if len(chosen.scrapes) < 2:
            raise RunFailed(error or f"{self.url}: no two scrapes of one process of the server to compare")
        how = replace(
            circumstances(stretches, chosen, self.scrapes),
            unanswered=self.failed,
            reason=_short(self.reason, self.url),
            cut=self.cut,
        )
        return self._result(engine, chosen, how, error)

    def _result(self, engine: Engine, window: Window, how: Circumstances, error: str | None = None) -> SplitResult:
        found = self._modelled(split(engine, window))
        return SplitResult(
            biphase=self.origin.version,
            command=self.origin.command,
            url=self.url,
            split=found,
            verdicts=split_verdicts(found, how),
            meaning=meaning(found),
            error=error,
        )

    def since_start(self) -> SplitResult:
        """One scrape as the window from the start of its server, when all counters were zero."""
        only = self.scrapes[-1]
        engine = recognise(only)
        if engine is None:
            raise BadInput(explain_unknown(only))
        began = only.value(("process_start_time_seconds",))
        zero = replace(only, series={}, at=began if began is not None and 0 < began < only.at else only.at)
        how = Circumstances(since_start=True, untimed=not only.timed, cut=self.cut)
        found = self._result(engine, Window([zero, only]), how)
        return msgspec.structs.replace(found, split=msgspec.structs.replace(found.split, scrapes=1))

    def _modelled(self, found: Split) -> Split:
        laws = self.origin.laws
        if laws is None or found.engine_s.origin == "counted":
            return found
        return with_engine_seconds(found, modelled_engine_seconds(laws, found))


def _short(reason: str, url: str) -> str:
    return reason.removeprefix(f"{url}: ")


async def measure(
    url: str, access: Access, plan: SplitPlan, origin: Origin, keep: KeepScrape, show: Show
) -> SplitResult:
    """Watch a server's metrics and split what they gained; every scrape goes to ``keep`` as it comes.

    Raises ``RunFailed`` when there are no metrics to watch. A watch that is interrupted, or that loses the server,
    gives what was measured until then, with ``error`` set.
    """
    async with connect(access) as session:
        page = await find_page(session, url)
        if page.scrape.series and recognise(page.scrape) is None:
            raise RunFailed(f"{page.url}: {explain_unknown(page.scrape)}")
        if (engine := recognise(page.scrape)) is not None and (reason := impossible(engine, page.scrape)) is not None:
            raise RunFailed(f"{page.url}: {reason}")
        watch = Watch(redacted(page.url), origin, plan)
        look = partial(_look, session, page.url, watch, keep)
        error = None
        try:
            keep(page.scrape, page.text)
            watch.add(page.scrape)
            show(watch)
            await _watch(look, watch, show)
        except asyncio.CancelledError:
            await _last_look(look, watch)
            if len(watch.scrapes) < 2:
                raise  # there is no window to tell of
            error = INTERRUPTED if plan.seconds is not None else None  # a watch without end has no other one
        except RunFailed as failure:  # the disk is full
            error = str(failure)
        return watch.result(error)


async def _watch(look: Look, watch: Watch, show: Show) -> None:
    """Look at even intervals, the last time at the very end of the window."""
    start, plan = time.perf_counter(), watch.plan
    end = float("inf") if plan.seconds is None else start + plan.seconds
    due = start
    while due < end:
        due = min(max(due + plan.every, time.perf_counter()), end)  # a look that was late is not made up for
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await look()
        show(watch)


async def _look(session: aiohttp.ClientSession, url: str, watch: Watch, keep: KeepScrape) -> None:
    try:
        found, text = await fetch(session, url)
    except RunFailed as error:
        watch.miss(str(error))
    except NoPageError as error:
        watch.miss(explain_status(error.reply.status, error.reply.body, url))
    except ValueError as error:
        watch.miss(f"{watch.url}: not metrics in Prometheus' text format: {error}")
    else:
        if (reason := watch.unusable(found)) is not None:
            watch.miss(f"{watch.url}: {reason}")
            return
        watch.add(found)
        keep(found, text)


async def _last_look(look: Look, watch: Watch) -> None:
    """The window ends where it was interrupted, if the server answers at once."""
    before = watch.failed, watch.reason, watch.silent
    try:
        async with asyncio.timeout(LAST_SCRAPE_S):
            await look()
    except (TimeoutError, RunFailed):
        watch.failed, watch.reason, watch.silent = before


def from_files(paths: Sequence[Path], origin: Origin) -> SplitResult:
    """The split between saved scrapes, or of one scrape since its server's start."""
    watch = Watch(", ".join(map(str, paths)), origin, SplitPlan(None, 0.0))
    saved = read_scrapes(paths)
    watch.scrapes, watch.cut = saved.scrapes, len(saved.cut)
    if watch.engine is None:
        raise BadInput(f"{watch.url}: {explain_unknown(watch.scrapes[-1])}")
    wrong = (reason for one in watch.scrapes if (reason := impossible(watch.engine, one)) is not None)
    if (reason := next(wrong, None)) is not None:
        raise BadInput(f"{watch.url}: {reason}")
    if len(watch.scrapes) == 1:
        return watch.since_start()
    try:
        return watch.result()
    except RunFailed as error:
        raise BadInput(f"{error}; scrapes without a time of their own count in the order given") from error
