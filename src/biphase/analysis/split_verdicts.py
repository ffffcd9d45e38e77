"""Signs that a split is not what it looks like."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from biphase.analysis.phase_split import Split
from biphase.analysis.split_model import MOST_BUSY
from biphase.analysis.split_window import Window
from biphase.analysis.verdicts import Verdict
from biphase.client.scrape import Scrape

EDGE_SHARE = 0.1
"""Requests in flight at the window's edges, over those that ended inside, from which the edges matter."""


@dataclass(frozen=True)
class Circumstances:
    """How the scrapes of a split came: ``restarts`` of the server and the seconds of other stretches left out,
    ``unanswered`` scrapes and the last reason, whether ``several`` servers answered in turn, whether one scrape stands
    for all ``since_start``, whether times are those of files, and the files whose last scrape was ``cut`` off."""

    restarts: int = 0
    left_out_s: float = 0.0
    unanswered: int = 0
    reason: str = ""
    several: bool = False
    since_start: bool = False
    untimed: bool = False
    cut: int = 0


def circumstances(stretches: Sequence[Window], chosen: Window, scrapes: Sequence[Scrape]) -> Circumstances:
    """What the scrapes themselves tell of how they came."""
    processes = [one.process for one in scrapes if one.process is not None]
    changes = sum(a != b for a, b in pairwise(processes))
    return Circumstances(
        restarts=len(stretches) - 1,
        left_out_s=max(scrapes[-1].at - scrapes[0].at - chosen.seconds, 0.0),
        several=changes >= len(set(processes)) > 1,  # one that was seen before came back
        untimed=not all(one.timed for one in scrapes),
    )


def split_verdicts(found: Split, how: Circumstances) -> tuple[Verdict, ...]:
    """Everything that spoils the numbers, or of which a reader must know."""
    checks: tuple[Callable[[Split, Circumstances], Verdict | None], ...] = (
        _several,
        _restarted,
        _unanswered,
        _since_start,
        _file_times,
        _cut_off,
        _no_traffic,
        _edges,
        _cache_unknown,
        _impossible_gauge,
        _modelled,
        _too_busy,
    )
    return tuple(verdict for check in checks if (verdict := check(found, how)) is not None)


def _several(found: Split, how: Circumstances) -> Verdict | None:
    if not how.several:
        return None
    return Verdict(
        "several-servers",
        "several servers answered in turn at this address, as behind a load balancer",
        "read each one's own metrics; this is of the longest stretch of one alone",
    )


def _restarted(found: Split, how: Circumstances) -> Verdict | None:
    if how.several or how.restarts == 0:
        return None
    times = "once" if how.restarts == 1 else f"{how.restarts} times"
    return Verdict(
        "restart",
        f"the server was started anew {times}: its counters began at zero",
        f"this is of the longest stretch between; {how.left_out_s:.1f} s are left out",
    )


def _unanswered(found: Split, how: Circumstances) -> Verdict | None:
    if how.unanswered == 0:
        return None
    return Verdict(
        "unanswered",
        f"{how.unanswered} scrape{'s' if how.unanswered > 1 else ''} gave no counts ({how.reason})",
        "the window ends with the last that did",
    )


def _since_start(found: Split, how: Circumstances) -> Verdict | None:
    if not how.since_start:
        return None
    return Verdict(
        "since-start",
        "one scrape alone: the numbers are of all that the server did since it started, its warm-up among them",
        "a second scrape, a minute later, makes a window of the two",
    )


def _file_times(found: Split, how: Circumstances) -> Verdict | None:
    if not how.untimed:
        return None
    return Verdict(
        "file-times",
        "the scrapes have no time of their own: that of their files is taken",
        "if they were copied, believe no number per second; biphase split --save writes the times down",
    )


def _cut_off(found: Split, how: Circumstances) -> Verdict | None:
    if how.cut == 0:
        return None
    where = "the file" if how.cut == 1 else f"{how.cut} files"
    return Verdict(
        "cut-off",
        f"the last scrape of {where} is cut off and left out",
        "this is of the whole scrapes before it; copy the file again if there is more",
    )


def _no_traffic(found: Split, how: Circumstances) -> Verdict | None:
    gains = (found.tokens.prefill, found.tokens.decode, found.request_s.decode, found.finished)
    if any(gain is not None and gain.value > 0 for gain in gains):
        return None
    if found.running is not None and found.running.most > 0:
        return Verdict(
            "nothing-ended",
            f"up to {found.running.most:.0f} requests ran, and nothing was counted: this engine counts a request at "
            "its end",
            "measure longer than a request takes: --for",
        )
    return Verdict("no-traffic", "nothing was prefilled or decoded in this window", "measure while there is traffic")


def _edges(found: Split, how: Circumstances) -> Verdict | None:
    if found.finished is None or found.running is None or how.since_start or not found.finished.value:
        return None
    over = found.running.first + found.running.last
    if over < EDGE_SHARE * found.finished.value:
        return None
    return Verdict(
        "edges",
        f"{over:.0f} requests were in flight at an edge of the window and {found.finished.value:.0f} ended inside: "
        "request-seconds, counted at the end, are not of exactly the tokens beside them",
        "a longer window makes the edges small: --for",
    )


def _cache_unknown(found: Split, how: Circumstances) -> Verdict | None:
    if found.tokens.prefill is None or found.prompt_tokens is None or found.tokens.prefill != found.prompt_tokens:
        return None
    return Verdict(
        "cache-unknown",
        "the engine does not tell how many prompt tokens its prefix cache gave: prefill tokens are all that were sent",
        "with prefix caching on, less than that was computed",
    )


def _impossible_gauge(found: Split, how: Circumstances) -> Verdict | None:
    usage = found.kv_usage
    if usage is None or 0 <= usage.most <= 1:
        return None
    return Verdict("impossible-gauge", f"the engine calls its KV cache {100 * usage.most:.0f} % full", "do not use it")


def _modelled(found: Split, how: Circumstances) -> Verdict | None:
    if found.engine_s.origin != "modelled" or _beyond(found):
        return None
    return Verdict(
        "modelled",
        "engine-seconds are modelled, not counted: see the sources below the table",
        found.engine_s_advice or "compare with an engine that counts them",
    )


def _beyond(found: Split) -> bool:
    """Busier than the window is long, by more than a step of a second that was counted at its end."""
    if found.engine_busy is None or found.window_s is None:
        return False
    return found.engine_busy > MOST_BUSY + 1.0 / found.window_s


def _too_busy(found: Split, how: Circumstances) -> Verdict | None:
    if not _beyond(found) or found.engine_busy is None:
        return None
    if found.engine_s.origin == "modelled":
        return Verdict(
            "modelled-too-long",
            f"the laws make the engine busy for {100 * found.engine_busy:.0f} % of the window: they are not this "
            "traffic's, or prompts share the passes of decode steps",
            "profile this server, as it is now; until then trust no engine-seconds",
        )
    return Verdict(
        "too-busy",
        f"the engine counts {100 * found.engine_busy:.0f} % of the window as its own time",
        "several engines may share one set of counters; trust the ratio, not the sum",
    )
