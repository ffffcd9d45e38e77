"""``biphase stall``: what a long prompt does to the streams that decode beside it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase import __version__
from biphase.cli import profile_options as options
from biphase.cli.outputs import check_outputs, deliver
from biphase.cli.stall_options import make_stall_plan
from biphase.cli.targets import found_server, one_interrupt, server_address, start_engine
from biphase.errors import BadInput, BiphaseError, RunFailed
from biphase.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from biphase.analysis.stall_result import ServerStall, StallResult
    from biphase.client.endpoint import Access
    from biphase.experiments.stall import Run, StallPlan
    from biphase.report.progress import Display

CHUNK = 512
"""Budget of the built-in engine's second run, in tokens of a step."""
BUDGET_STEPS = 4
"""ITL budget of its third run where none is wanted, in quiet decode steps: below three a budget buys little."""


@dataclass(frozen=True)
class Subject:
    """A server to measure: at ``url``, or the built-in engine with ``engine_options``."""

    name: str
    url: str | None
    model: str | None
    access: "Access"
    engine_options: tuple[str, ...] = ()


Subjects = Iterator[Subject]
"""One after the other: what the next one is may depend on what the last one showed."""


def stall(
    url: options.Url = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="URL2", show_default=False, help="A second server, measured after the first."),
    ] = None,
    victims: Annotated[int, typer.Option(help="Streams that decode when the prompt comes.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt; shortened to the server's limit.")] = 16000,
    repeats: Annotated[int, typer.Option(help="How often the prompt comes.")] = 3,
    itl_slo: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            show_default=False,
            help="A wanted ITL, as in 50ms: the chunk size that keeps it, by the measured laws; and the ITL budget of "
            "the built-in engine's third run.",
        ),
    ] = None,
    model: options.Model = None,
    compare_model: Annotated[
        str | None,
        typer.Option(show_default=False, help="Name of the model at URL2 (default: as --model, or the only one)."),
    ] = None,
    json: options.Json = None,
    html: options.Html = None,
    records: options.Records = None,
    api_key: options.ApiKey = None,
    header: options.Header = None,
    ca: options.Ca = None,
    timeout: options.Timeout = 300.0,
    dtype: options.Dtype = None,
    random_weights: options.RandomWeights = False,
) -> None:
    """Show head-of-line blocking: streams decode, a long prompt arrives, what happens to their ITL?

    On any OpenAI-compatible server, or on two; without a URL on the built-in engine with whole prompts, with chunks,
    and with an ITL budget.
    """
    plan = make_stall_plan(victims, prompt, repeats, itl_slo)
    access = options.make_access(api_key, header or [], timeout, ca)
    engine_options = [*(["--dtype", dtype] if dtype else []), *(["--random-weights"] if random_weights else [])]
    if url is None and compare is not None:
        raise BadInput("--compare needs a URL to compare with; without one the built-in engine is compared with itself")
    if compare_model is not None and compare is None:
        raise BadInput("--compare-model names the model of a second server: --compare URL2 is missing")
    named = [server_address(one, access, engine_options) for one in (url, compare) if one is not None]
    check_outputs(json=json, html=html, records=records)
    found: list[ServerStall] = []
    if url is None:
        subjects = _built_in(model or DEFAULT_MODEL, access, engine_options, plan, found)
    else:
        subjects = iter(_named(named, (model, compare_model or model)))
    with one_interrupt() as exit_status:
        try:
            with ExitStack() as stack:
                result = _run(stack, subjects, found, plan, records)
            _report(result, json, html)
        except KeyboardInterrupt:
            raise typer.Exit(exit_status()) from None


def _named(addresses: "Sequence[tuple[str, Access]]", models: Sequence[str | None]) -> list[Subject]:
    names = ("server",) if len(addresses) == 1 else ("A", "B")
    return [Subject(n, url, model, access) for n, (url, access), model in zip(names, addresses, models, strict=False)]


def _built_in(
    model: str, access: "Access", engine_options: Sequence[str], plan: "StallPlan", found: "list[ServerStall]"
) -> Subjects:
    """Whole prompts, chunks by the token budget, chunks by an ITL budget; ``found`` are the results until then."""
    large = ("--max-num-batched-tokens", str(max(8192, plan.prompt + plan.victims)))
    chunks = ("--max-num-batched-tokens", str(CHUNK))
    yield Subject("whole prompts", None, model, access, (*engine_options, "--no-chunked-prefill", *large))
    yield Subject(f"budget of {CHUNK} tokens", None, model, access, (*engine_options, *chunks))
    quiet = next((s.quiet_gap_ms.median for s in found if s.quiet_gap_ms), None)
    budget = plan.itl_slo_ms or (round(BUDGET_STEPS * quiet, -1) if quiet and quiet >= 5 else 20.0)
    timed = ("--itl-budget-ms", f"{budget:g}")
    yield Subject(f"ITL budget {budget:g} ms", None, model, access, (*engine_options, *timed, *large))


def _run(
    stack: ExitStack,
    subjects: Subjects,
    found: "list[ServerStall]",
    plan: "StallPlan",
    records: Path | None,
) -> "StallResult":
    """Measure one subject after the other into ``found``; a failure after the first one keeps what there is."""
    from biphase.client.record import Keep, open_records
    from biphase.experiments.facts import INTERRUPTED
    from biphase.experiments.stall import Run, result
    from biphase.report.progress import display

    keep: Keep = stack.enter_context(open_records(records)) if records else lambda record: None
    shown = stack.enter_context(display())
    command = options.shown_command()
    run = Run(keep, shown.step, __version__, command)
    error = None
    try:
        for subject in subjects:
            found.append(_measure(subject, plan, run, shown))
            if (error := found[-1].error) is not None:
                break
    except (BiphaseError, KeyboardInterrupt) as failure:
        if not found:
            raise
        error = INTERRUPTED if isinstance(failure, KeyboardInterrupt) else str(failure)
    return result(plan, found, run, error)


def _measure(subject: Subject, plan: "StallPlan", run: "Run", shown: "Display") -> "ServerStall":
    import msgspec

    from biphase.client import clock
    from biphase.experiments.stall import measure

    with ExitStack() as stack:
        url, model, death = subject.url, subject.model, _lives
        if url is None:
            engine = start_engine(stack, str(model), subject.engine_options, shown)
            url, model, death = engine.url, engine.model, engine.death
        elif url == "local":
            url = found_server(subject.access, shown)
        shown.status(f"{subject.name}: asking {url} what it serves")
        found = clock.run(measure(url, model, subject.access, plan, subject.name, run))
        return msgspec.structs.replace(found, error=(death() if found.error else None) or found.error)


def _lives() -> str | None:
    """Nothing is known of how a server ended that is not a child of this process."""
    return None


def _report(result: "StallResult", json: Path | None, html: Path | None) -> None:
    """Table on stdout and files, also of a run that broke off; then its error, if there is one."""
    from biphase.experiments.facts import INTERRUPTED
    from biphase.report.pretty_json import pretty_json
    from biphase.report.stall_table import print_stall

    deliver(
        lambda: print_stall(result),
        (json, lambda: pretty_json(result)),
        (html, lambda: _page(result)),
    )
    if result.error == INTERRUPTED:
        raise KeyboardInterrupt
    if result.error is not None:
        raise RunFailed(result.error)


def _page(result: "StallResult") -> str:
    from biphase.report.stall_page import stall_page

    return stall_page(result)
