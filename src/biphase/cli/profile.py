"""``biphase profile``: measure prefill and decode of a server, by prompt length."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from biphase import __version__
from biphase.errors import BadInput, RunFailed
from biphase.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from biphase.client.endpoint import Access
    from biphase.client.record import Keep
    from biphase.experiments.profile import ProfilePlan, ProfileResult
    from biphase.report.progress import Display
    from biphase.server.launch import ServerProcess


def profile(
    url: Annotated[
        str | None,
        typer.Argument(
            show_default=False,
            help="Any OpenAI-compatible server, with or without /v1: http://127.0.0.1:8000. Without it the built-in "
            "engine is started for the measurement.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Name of the model at the server (default: the only one it lists), or the model of the built-in "
            f"engine: alias, GGUF file, folder, config.json (default: {DEFAULT_MODEL}).",
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1,16,128,512,2048",
    tokens: Annotated[int, typer.Option(help="Tokens to generate in each request.")] = 32,
    repeats: Annotated[int, typer.Option(help="Requests for each length.")] = 5,
    json: Annotated[Path | None, typer.Option(show_default=False, help="Write the result to this file.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            show_default=False, help="Write every request, with the stamp of each chunk, to this file (JSON lines)."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=["BIPHASE_API_KEY", "OPENAI_API_KEY"], show_default=False, help="Sent as a bearer token."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="Another header for each request, 'Name: value'; may be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest wait for the next byte of an answer, in seconds.")] = 300.0,
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="Of the built-in engine: the type it computes in.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Of the built-in engine: measure the shape in a config.json.")
    ] = False,
) -> None:
    """Measure prefill and decode of any OpenAI-compatible server, or of the built-in engine, by prompt length."""
    from biphase.client.endpoint import parse_url

    plan = _plan(lengths, tokens, repeats)
    access = _access(api_key, header or [], timeout)
    engine_options = [*(["--dtype", dtype] if dtype else []), *(["--random-weights"] if random_weights else [])]
    if url is not None:
        url = parse_url(_not_a_model(url))
        if engine_options:
            raise BadInput(f"{engine_options[0]} is for the built-in engine and says nothing to the server at {url}")
    with _sigterm_as_interrupt() as exit_status:
        try:
            with ExitStack() as stack:
                result = _run(stack, url, model, plan, access, engine_options, json, records)
            _report(result, json)
        except KeyboardInterrupt:
            raise typer.Exit(exit_status()) from None


def _run(
    stack: ExitStack,
    url: str | None,
    model: str | None,
    plan: "ProfilePlan",
    access: "Access",
    engine_options: list[str],
    json: Path | None,
    records: Path | None,
) -> "ProfileResult":
    """Measure ``url``, or the built-in engine, which ends with the stack."""
    import msgspec

    from biphase.client import clock
    from biphase.client.record import open_records
    from biphase.experiments.profile import measure
    from biphase.report.progress import display

    _check_writable(json)
    keep: Keep = stack.enter_context(open_records(records)) if records else lambda record: None
    shown = stack.enter_context(display())
    engine = None
    if url is None:
        engine = _start_engine(stack, model or DEFAULT_MODEL, engine_options, shown)
        url, model = engine.url, engine.model
    shown.status(f"asking {url} what it serves")
    result = clock.run(measure(url, model, access, plan, keep, shown.step, __version__))
    death = engine.death() if engine and result.error else None
    return msgspec.structs.replace(result, error=death) if death else result


def _start_engine(stack: ExitStack, model: str, options: list[str], shown: "Display") -> "ServerProcess":
    from biphase.server.launch import managed_server

    def on_wait(seconds: float) -> None:
        shown.status(f"starting the built-in engine on {model}")

    return stack.enter_context(managed_server(model, *options, on_wait=on_wait))


def _report(result: "ProfileResult", json: Path | None) -> None:
    """Table on stdout and JSON to its file, also of a run that broke off; then its error, if there is one."""
    import msgspec

    from biphase.experiments.profile import INTERRUPTED
    from biphase.report.tables import print_profile

    print_profile(result)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    if result.error == INTERRUPTED:
        raise KeyboardInterrupt
    if result.error is not None:
        raise RunFailed(result.error)


def _plan(lengths: str, tokens: int, repeats: int) -> "ProfilePlan":
    from biphase.experiments.profile import ProfilePlan

    try:
        wanted = tuple(int(part) for part in lengths.split(","))
    except ValueError:
        wanted = ()
    if not wanted or min(wanted) < 1:
        raise BadInput(f"--lengths {lengths!r}: expected whole numbers of tokens, 1 or more, as in 1,16,128")
    if tokens < 2:
        raise BadInput(f"--tokens {tokens}: expected 2 or more; decode begins with the second token")
    if repeats < 1:
        raise BadInput(f"--repeats {repeats}: expected 1 or more")
    return ProfilePlan(tuple(sorted(set(wanted))), tokens, repeats)


def _access(api_key: str | None, headers: list[str], timeout: float) -> "Access":
    from biphase.client.endpoint import Access

    if timeout <= 0:
        raise BadInput(f"--timeout {timeout:g}: expected seconds, more than 0")
    named = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for line in headers:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or "\n" in line:
            raise BadInput(f"--header {line!r}: expected 'Name: value'")
        named[name.strip()] = value.strip()
    return Access(named, timeout)


def _not_a_model(url: str) -> str:
    if "://" not in url and (url == DEFAULT_MODEL or url.endswith((".gguf", ".json"))):
        raise BadInput(f"{url} names a model, not a server; to measure it on the built-in engine: --model {url}")
    return url


def _check_writable(path: Path | None) -> None:
    """An output that cannot be written is said before the measurement, not after it."""
    if path is None:
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise BadInput(f"cannot write to {path}: {error.strerror}") from error


@contextmanager
def _sigterm_as_interrupt() -> Iterator[Callable[[], int]]:
    """SIGTERM ends the run as Ctrl-C does, so that the engine is ended and what was measured is kept.

    Gives the exit status of an interrupted run by the usual rule, 128 + the signal.
    """
    from biphase.client import clock

    received = [signal.SIGINT]

    def interrupt(number: int, frame: FrameType | None) -> None:
        received[0] = signal.Signals(number)
        # not through SIGINT: a shell lets the commands it runs in the background ignore that
        if not clock.interrupt():
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: 128 + received[0]
    finally:
        signal.signal(signal.SIGTERM, previous)
