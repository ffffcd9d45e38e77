"""``biphase split``: which phase the live traffic of a server needs, from its metrics."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase import __version__
from biphase.cli import profile_options as options
from biphase.cli.outputs import check_outputs, deliver
from biphase.cli.targets import found_server, one_interrupt, server_address
from biphase.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from biphase.client.endpoint import Access
    from biphase.client.scrape_files import KeepScrape
    from biphase.experiments.split import Origin, Show, SplitPlan, SplitResult
    from biphase.experiments.split import Watch as Watched

UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
DEFAULT_SECONDS = 60.0
LONGEST_S = 31 * 86400.0
SHORTEST_S = 0.1

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[URL]",
        show_default=False,
        help="A server, with or without /v1, or its page of metrics; local finds one on this machine's usual ports.",
    ),
]
For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", show_default="60s; without end with --watch", help="How long.")
]
Every = Annotated[str, typer.Option(metavar="TIME", help="How often to look.")]
Watch = Annotated[bool, typer.Option("--watch", help="A live view on the terminal; Ctrl-C ends it with the result.")]
From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE...",
        show_default=False,
        help="Watch nothing: read scrapes that --save or a plain download wrote; one alone counts from the start.",
    ),
]
Save = Annotated[
    Path | None, typer.Option(metavar="FILE", show_default=False, help="Write every scrape to this file as it comes.")
]
LawsFrom = Annotated[
    Path | None,
    typer.Option(
        "--laws",
        metavar="PROFILE.json",
        show_default=False,
        help="Model engine-seconds by the laws that biphase profile --json measured, where the engine tells none.",
    ),
]


def split(
    targets: Targets = None,
    duration: For = None,
    every: Every = "2s",
    watch: Watch = False,
    from_files: From = None,
    save: Save = None,
    laws: LawsFrom = None,
    json: options.Json = None,
    html: options.Html = None,
    api_key: options.ApiKey = None,
    header: options.Header = None,
    ca: options.Ca = None,
    timeout: options.Timeout = 20.0,
) -> None:
    """Split live traffic into prefill and decode: in tokens, request-seconds and engine-seconds."""
    plan = make_plan(duration, every, watch)
    access = options.make_access(api_key, header or [], timeout, ca)
    files = _files(targets or [], from_files or [], watch, save)
    url, access = ("", access) if files else server_address(_one(targets or []), access)
    check_outputs(save=save, json=json, html=html)
    with one_interrupt() as exit_status:
        try:
            origin = _origin(laws)
            if files:
                result = _from_files(files, origin)
            else:
                with ExitStack() as stack:
                    result = _measured(stack, url, access, plan, origin, _live() if watch else _progress(plan), save)
            _report(result, json, html)
        except KeyboardInterrupt:
            raise typer.Exit(exit_status()) from None


def make_plan(duration: str | None, every: str, watch: bool) -> "SplitPlan":
    """How long and how often to look; ``BadInput`` names the option that is out of range."""
    from biphase.experiments.split import SplitPlan

    interval = parse_time("--every", every)
    if duration is None:
        return SplitPlan(None if watch else DEFAULT_SECONDS, interval)
    whole = parse_time("--for", duration)
    return SplitPlan(whole, min(interval, whole))


def parse_time(option: str, text: str) -> float:
    """Seconds of a time such as 60s, 500ms, 2m, 1h or 90."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)", text.strip())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise BadInput(f"{option} {text!r}: expected a time from 100ms to 31 days, as in 60s, 2m, 1h")
    return seconds


def _files(targets: list[str], files: list[Path], watch: bool, save: Path | None) -> list[Path]:
    """The files of ``--from``, none without it; ``BadInput`` for what has no place beside it."""
    if not files:
        return []
    if watch or save is not None:
        raise BadInput(f"--from watches nothing: leave {'--watch' if watch else '--save'} away")
    if (server := next(filter(_names_server, targets), None)) is not None:
        raise BadInput(f"--from watches nothing: leave {server} away, or leave --from away and watch it")
    return [*files, *map(Path, targets)]


def _one(targets: list[str]) -> str:
    if not targets:
        raise BadInput("what to watch? give a server's URL (as in http://127.0.0.1:8000), or --from FILE...")
    if len(targets) > 1:
        raise BadInput(f"one server at a time: {targets[1]!r} is one word too many (saved scrapes: --from FILE...)")
    return targets[0]


def _names_server(target: str) -> bool:
    """Whether a word beside ``--from`` is a server and not one more file."""
    from biphase.client.endpoint import parse_url

    if Path(target).exists():
        return False
    with suppress(BadInput):
        return target == "local" or bool(parse_url(target))
    return "://" in target


def _origin(laws: Path | None) -> "Origin":
    import shlex

    from biphase.analysis.split_model import read_laws
    from biphase.experiments.split import Origin

    return Origin(__version__, shlex.join(options.shown_command()), read_laws(laws) if laws is not None else None)


def _from_files(files: list[Path], origin: "Origin") -> "SplitResult":
    from biphase.experiments.split import from_files

    return from_files(files, origin)


def _measured(
    stack: ExitStack,
    url: str,
    access: "Access",
    plan: "SplitPlan",
    origin: "Origin",
    view: AbstractContextManager["Show"],
    save: Path | None,
) -> "SplitResult":
    from biphase.client import clock
    from biphase.client.scrape_files import save_scrapes
    from biphase.experiments.split import measure
    from biphase.report.progress import display

    if url == "local":
        with display() as shown:
            url = found_server(access, shown)
    keep: KeepScrape = stack.enter_context(save_scrapes(save)) if save is not None else lambda found, text: None
    return clock.run(measure(url, access, plan, origin, keep, stack.enter_context(view)))


@contextmanager
def _live() -> "Iterator[Show]":
    """A view that is drawn anew after each scrape; a line for each where stdout is no terminal."""
    from rich.console import Console
    from rich.live import Live

    from biphase.report.split_tables import live_line, live_view

    console = Console()
    if not console.is_terminal:
        yield lambda seen: _print_or_end(live_line(seen))
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda seen: live.update(live_view(seen), refresh=True)


def _print_or_end(line: str) -> None:
    """A line of the view; a stdout that takes no more ends the watch as Ctrl-C does: its files are still written."""
    from biphase.client import clock

    try:
        print(line, flush=True)
    except OSError:
        clock.interrupt()


@contextmanager
def _progress(plan: "SplitPlan") -> "Iterator[Show]":
    from biphase.report.progress import display
    from biphase.report.split_tables import live_line

    with display() as shown:

        def show(seen: "Watched") -> None:
            done = seen.scrapes[-1].at - seen.scrapes[0].at
            shown.step(round(done), round(plan.seconds or 0), live_line(seen))

        yield show


def _report(result: "SplitResult", json: Path | None, html: Path | None) -> None:
    """Table and files, also of a watch that broke off; then its error."""
    from biphase.experiments.split import INTERRUPTED
    from biphase.report.split_page import split_json, split_page
    from biphase.report.split_tables import print_split

    deliver(lambda: print_split(result), (json, lambda: split_json(result)), (html, lambda: split_page(result)))
    if result.error == INTERRUPTED:
        raise KeyboardInterrupt
    if result.error is not None:
        raise RunFailed(result.error)
