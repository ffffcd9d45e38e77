"""``biphase profile``: measure prefill and decode of a server, by prompt length and batch."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from biphase import __version__
from biphase.cli import profile_options as options
from biphase.cli.local_tokenizer import load_tokenizer
from biphase.cli.outputs import check_outputs, deliver
from biphase.cli.own_model import own_hardware
from biphase.cli.targets import found_server, one_interrupt, server_address, start_engine
from biphase.errors import BadInput, RunFailed
from biphase.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from biphase.analysis.profile_result import Hardware, ProfileResult
    from biphase.client.endpoint import Access
    from biphase.client.record import Keep
    from biphase.experiments.profile import ProfilePlan


@dataclass(frozen=True)
class Outputs:
    """Where the result goes beside the terminal."""

    json: Path | None
    html: Path | None
    markdown: Path | None

    def check(self, records: Path | None) -> None:
        """Say before the measurement what cannot be written after it."""
        check_outputs(json=self.json, html=self.html, markdown=self.markdown, records=records)


def profile(
    url: options.Url = None,
    model: options.Model = None,
    lengths: options.Lengths = None,
    tokens: options.Tokens = 32,
    repeats: options.Repeats = 5,
    full: options.Full = False,
    model_config: options.ModelConfig = None,
    gpu: options.Gpu = None,
    tp: options.Tp = 1,
    json: options.Json = None,
    html: options.Html = None,
    markdown: options.Markdown = None,
    records: options.Records = None,
    from_records: options.FromRecords = None,
    api_key: options.ApiKey = None,
    header: options.Header = None,
    ca: options.Ca = None,
    timeout: options.Timeout = 300.0,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    random_weights: options.RandomWeights = False,
) -> None:
    """Measure prefill and decode of any OpenAI-compatible server, or of the built-in engine, by prompt length."""
    plan = options.make_plan(lengths, tokens, repeats, full)
    access = options.make_access(api_key, header or [], timeout, ca)
    engine_options = [*(["--dtype", dtype] if dtype else []), *(["--random-weights"] if random_weights else [])]
    outputs = Outputs(json, html, markdown)
    own = model_config is None and url is None and from_records is None
    hardware = None if own else options.make_hardware(model_config, gpu, tp)
    device = options.check_device(gpu, tp) if own else None
    if from_records is not None and (url is not None or records is not None):
        raise BadInput("--from-records measures nothing: leave the URL and --records away")
    if url is not None:
        url, access = server_address(url, access, engine_options)
    outputs.check(records)
    with one_interrupt() as exit_status:
        try:
            if from_records is not None:
                _report(_analyse(from_records, hardware), outputs)
                return
            with ExitStack() as stack:
                result = _run(stack, url, model, plan, access, engine_options, hardware, device, records, tokenizer)
            _report(result, outputs)
        except KeyboardInterrupt:
            raise typer.Exit(exit_status()) from None


def _analyse(path: Path, hardware: "Hardware | None") -> "ProfileResult":
    from biphase.analysis.profile_result import analyse
    from biphase.client.record import read_run

    facts, records = read_run(path)
    if facts is None:
        raise BadInput(f"{path} has no line on its run: it was not written by biphase profile --records")
    return analyse(facts, records, hardware)


def _run(
    stack: ExitStack,
    url: str | None,
    model: str | None,
    plan: "ProfilePlan",
    access: "Access",
    engine_options: list[str],
    hardware: "Hardware | None",
    gpu: str | None,
    records: Path | None,
    tokenizer: str | None,
) -> "ProfileResult":
    """Measure ``url``, or the built-in engine, which ends with the stack."""
    import msgspec

    from biphase.client import clock
    from biphase.client.record import open_records
    from biphase.client.tokenize import LocalTokenizer
    from biphase.experiments.profile import measure
    from biphase.report.progress import display

    local = LocalTokenizer(load_tokenizer(tokenizer)) if tokenizer else None
    keep: Keep = stack.enter_context(open_records(records)) if records else lambda record: None
    shown = stack.enter_context(display())
    engine, note = None, None
    if url is None:
        engine = start_engine(stack, model or DEFAULT_MODEL, engine_options, shown)
        if hardware is None:
            hardware, note = own_hardware(engine.url, model or DEFAULT_MODEL, gpu)
        url, model = engine.url, engine.model
    elif url == "local":
        url = found_server(access, shown)
    shown.status(f"asking {url} what it serves")
    command = options.shown_command()
    result = clock.run(measure(url, model, access, plan, keep, shown.step, __version__, command, hardware, local))
    death = engine.death() if engine and result.error else None
    notes = (*result.notes, note) if note else result.notes
    return msgspec.structs.replace(result, error=death or result.error, notes=notes)


def _report(result: "ProfileResult", outputs: Outputs) -> None:
    """Table on stdout and files, also of a run that broke off; then its error, if there is one."""
    from biphase.experiments.facts import INTERRUPTED
    from biphase.report.files import json_bytes, markdown
    from biphase.report.tables import print_profile

    deliver(
        lambda: print_profile(result),
        (outputs.json, lambda: json_bytes(result)),
        (outputs.markdown, lambda: markdown(result)),
        (outputs.html, lambda: _page(result)),
    )
    if result.error == INTERRUPTED:
        raise KeyboardInterrupt
    if result.error is not None:
        raise RunFailed(result.error)


def _page(result: "ProfileResult") -> str:
    from biphase.report.page import page  # only where it is asked for: it loads the plots

    return page(result)
