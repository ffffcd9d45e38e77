"""The options of ``biphase profile``: their types and help, and from their text to what a measurement takes."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.ranges import LONGEST_S, check_range
from biphase.errors import BadInput
from biphase.models import DEFAULT_MODEL
from biphase.redaction import redacted_command

if TYPE_CHECKING:
    from biphase.analysis.profile_result import Hardware
    from biphase.client.endpoint import Access
    from biphase.experiments.profile import ProfilePlan

BATCHES = (2, 4, 8)
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2: token
FULL_LENGTHS = "1,16,64,128,256,384,512,768,1024,1536,2048"
DEFAULT_LENGTHS = "1,16,128,512,2048"
MOST_TOKENS = 1_000_000
MOST_PROMPT = 16_777_216
"""Tokens: the longest that biphase roofline computes, beyond any context."""
MOST_REPEATS = 10_000

Url = Annotated[
    str | None,
    typer.Argument(
        show_default=False,
        help="Any OpenAI-compatible server, with or without /v1: http://127.0.0.1:8000; local finds one on this "
        "machine's usual ports. Without it the built-in engine is started for the measurement.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="Name of the model at the server (default: the only one it lists), or the model of the built-in "
        f"engine: alias, GGUF file, folder, config.json (default: {DEFAULT_MODEL}).",
    ),
]
Lengths = Annotated[
    str | None, typer.Option(show_default=f"{DEFAULT_LENGTHS}; more with --full", help="Prompt lengths in tokens.")
]
Tokens = Annotated[int, typer.Option(help="Tokens to generate in each request.")]
Repeats = Annotated[int, typer.Option(help="Requests for each length.")]
Full = Annotated[
    bool,
    typer.Option("--full", help="More lengths, and the whole grid of batches and contexts."),
]
ModelConfig = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        show_default=False,
        help="The model's shape as in biphase roofline, to compare with --gpu. The built-in engine's is known.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="The server's device, as in biphase roofline. For the built-in engine: this machine, if it is calibrated.",
    ),
]
Tp = Annotated[int, typer.Option(min=1, help="GPUs that share the model (tensor parallel).")]
Json = Annotated[
    Path | None, typer.Option("--json", show_default=False, metavar="FILE", help="Write the result to this file.")
]
Html = Annotated[
    Path | None, typer.Option("--html", show_default=False, metavar="FILE", help="Write a report page to this file.")
]
Markdown = Annotated[
    Path | None,
    typer.Option("--markdown", show_default=False, metavar="FILE", help="Write the table to paste into an issue."),
]
Records = Annotated[
    Path | None,
    typer.Option(
        show_default=False,
        metavar="FILE",
        help="Write every request, with the stamp of each chunk, to this file (JSON lines).",
    ),
]
FromRecords = Annotated[
    Path | None,
    typer.Option(show_default=False, metavar="FILE", help="Measure nothing: analyse a file that --records wrote."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar=["BIPHASE_API_KEY", "OPENAI_API_KEY"], show_default=False, help="Sent as a bearer token."),
]
Header = Annotated[
    list[str] | None,
    typer.Option(show_default=False, help="Another header for each request, 'Name: value'; may be repeated."),
]
Ca = Annotated[
    Path | None,
    typer.Option(show_default=False, metavar="FILE", help="Certificates of a private authority to trust (PEM)."),
]
Timeout = Annotated[float, typer.Option(help="Longest wait for the next byte of an answer, in seconds.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        show_default=False,
        help="Counts tokens where the server counts nowhere: tokenizer.json, its folder, a GGUF file, a repository.",
    ),
]
Dtype = Annotated[str | None, typer.Option(show_default=False, help="Of the built-in engine: the type it computes in.")]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Of the built-in engine: measure the shape in a config.json.")
]


def make_plan(lengths: str | None, tokens: int, repeats: int, full: bool) -> "ProfilePlan":
    """What to measure; ``BadInput`` names the option that is out of range."""
    from biphase.experiments.profile import ProfilePlan

    lengths = lengths if lengths is not None else FULL_LENGTHS if full else DEFAULT_LENGTHS
    try:
        wanted = tuple(int(part) for part in lengths.split(","))
    except ValueError:
        wanted = ()
    if not wanted or min(wanted) < 1 or max(wanted) > MOST_PROMPT:
        raise BadInput(
            f"--lengths {lengths!r}: expected whole numbers of tokens, 1 or more and at most {MOST_PROMPT:,}, as in "
            "1,16,128"
        )
    if not 2 <= tokens <= MOST_TOKENS:
        raise BadInput(f"--tokens {tokens}: expected 2 to {MOST_TOKENS:,}; decode begins with the second token")
    check_range("--repeats", repeats, 1, MOST_REPEATS)
    return ProfilePlan(tuple(sorted(set(wanted))), tokens, repeats, BATCHES, full, probe=True)


def make_access(api_key: str | None, headers: list[str], timeout: float, ca: Path | None) -> "Access":
    """How to talk to the server."""
    from biphase.client.endpoint import Access

    check_range("--timeout", timeout, 0.001, LONGEST_S, "seconds")
    if api_key and not api_key.isprintable():
        raise BadInput("the API key holds a control character, such as the end of a line; give the key alone")
    named = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for line in headers:
        name, colon, value = line.partition(":")
        if not colon or not HEADER_NAME.fullmatch(name.strip()) or not line.isprintable():
            raise BadInput(f"--header {line!r}: expected 'Name: value', the name of letters, digits and hyphens")
        named[name.strip()] = value.strip()
    access = Access(named, timeout, ca)
    access.tls()
    return access


def make_hardware(model_config: str | None, gpu: str | None, tp: int) -> "Hardware | None":
    """The shape and the device to compare with; None unless the user named both."""
    if model_config is None and gpu is None:
        return None
    if model_config is None or gpu is None:
        missing = "--model-config" if model_config is None else "--gpu"
        raise BadInput(f"comparing with the hardware needs both --model-config and --gpu; {missing} is missing")
    from biphase.analysis.profile_result import Hardware
    from biphase.roofline.catalogue import load
    from biphase.roofline.hardware import find_device

    return Hardware(load(model_config), find_device(gpu), tp)


def check_device(gpu: str | None, tp: int) -> str | None:
    """The device named for the built-in engine; ``BadInput`` now rather than after its start."""
    from biphase.roofline.hardware import find_device

    if tp != 1:
        raise BadInput(f"--tp {tp}: the built-in engine runs on one device")
    if gpu is not None:
        find_device(gpu)
    return gpu


def refuse_model_as_url(url: str) -> str:
    """The URL; ``BadInput`` when it is a model's name or file."""
    if "://" not in url and (url == DEFAULT_MODEL or url.endswith((".gguf", ".json"))):
        raise BadInput(f"{url} names a model, not a server; to measure it on the built-in engine: --model {url}")
    return url


def shown_command() -> list[str]:
    """The command line as it was typed, without what nobody else may see."""
    return ["biphase", *redacted_command(sys.argv[1:])]
