"""The options of ``biphase stall``, from their text to what a measurement takes."""

import re
from typing import TYPE_CHECKING

from biphase.cli import profile_options as options
from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.experiments.stall import StallPlan

MOST_VICTIMS = 1024
TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
IN_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def make_stall_plan(victims: int, prompt: int, repeats: int, itl_slo: str | None) -> "StallPlan":
    """What to measure; ``BadInput`` names the option that is out of range."""
    from biphase.experiments.stall import StallPlan

    if not 1 <= victims <= MOST_VICTIMS:
        raise BadInput(f"--victims {victims}: expected 1 to {MOST_VICTIMS:,} streams")
    if not 1 <= prompt <= options.MOST_TOKENS:
        raise BadInput(f"--prompt {prompt}: expected 1 to {options.MOST_TOKENS:,} tokens")
    if not 1 <= repeats <= options.MOST_REPEATS:
        raise BadInput(f"--repeats {repeats}: expected 1 to {options.MOST_REPEATS:,}")
    return StallPlan(victims, prompt, repeats, _milliseconds(itl_slo))


def _milliseconds(itl_slo: str | None) -> float | None:
    if itl_slo is None:
        return None
    match = TIME.fullmatch(itl_slo.strip())
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"--itl-slo {itl_slo!r}: expected a time with its unit, as in 50ms or 0.05s")
    return float(match[1]) * IN_MS[match[2]]
