"""``biphase compare``: two profiles, or two benches, side by side, and a status for CI."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from biphase.analysis.comparing import Comparison


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A.json", show_default=False, help="From biphase profile --json, or bench --json.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B.json", show_default=False, help="The one that may be worse.")],
    fail_if_worse: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            show_default=False,
            help="Exit with 1 when a number of B is worse than A's by more than this, and beyond the noise: 5%.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the comparison there.")
    ] = None,
) -> None:
    """Set two profiles, or two benches, side by side: better, worse, or no difference beyond the noise."""
    from biphase.analysis.comparing import compare as compared
    from biphase.analysis.comparing import read_profile, worse_than
    from biphase.analysis.comparing_levels import levels_worse
    from biphase.cli.outputs import check_writable, deliver
    from biphase.report.comparing_table import print_comparison

    limit = _fraction(fail_if_worse) if fail_if_worse is not None else None
    check_writable(json)
    profiles = read_profile(first), read_profile(second)
    found = compared(*profiles)
    deliver(lambda: print_comparison(*profiles, found), (json, lambda: _json(found)))
    if limit is None:
        return
    named = [f"{d.name} of {d.prompt_tokens} tokens x {d.ratio:.2f}" for d in worse_than(found.differences, limit)]
    for d in levels_worse(found.levels, limit):
        change = f"{100 * d.change:+.1f} points" if d.points else f"x {d.change:.2f}"
        named.append(f"{d.name} under {d.load} {change}")
    if named:
        raise RunFailed(f"worse by more than {fail_if_worse}: {', '.join(named)}")


def _json(found: "Comparison") -> bytes:
    from biphase.report.pretty_json import pretty_json

    return pretty_json(found)


def _fraction(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise BadInput(f"--fail-if-worse {text!r}: expected a percentage, 0 or more, as in 5%")
    return percent / 100
