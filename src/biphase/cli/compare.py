"""``biphase compare``: two profiles side by side, and a status for CI."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from biphase.analysis.comparing import Difference


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", show_default=False, help="From biphase profile --json.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", show_default=False, help="The one that may be worse.")],
    fail_if_worse: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            show_default=False,
            help="Exit with 1 when a number of B is slower than A's by more than this, and beyond the noise: 5%.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the comparison there.")
    ] = None,
) -> None:
    """Set two profiles side by side: better, worse, or no difference beyond the noise."""
    from biphase.analysis.comparing import differences, read_profile, worse_than
    from biphase.cli.outputs import check_writable, deliver
    from biphase.report.comparing_table import print_comparison

    limit = _fraction(fail_if_worse) if fail_if_worse is not None else None
    check_writable(json)
    profiles = read_profile(first), read_profile(second)
    found = differences(*profiles)
    deliver(lambda: print_comparison(*profiles, found), (json, lambda: _json(found)))
    slower = worse_than(found, limit) if limit is not None else []
    if slower:
        named = ", ".join(f"{d.name} of {d.prompt_tokens} tokens x {d.ratio:.2f}" for d in slower)
        raise RunFailed(f"slower by more than {fail_if_worse}: {named}")


def _json(found: "Sequence[Difference]") -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode({"differences": found}), indent=2) + b"\n"


def _fraction(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise BadInput(f"--fail-if-worse {text!r}: expected a percentage, 0 or more, as in 5%")
    return percent / 100
