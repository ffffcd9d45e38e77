"""The options of ``biphase stall``, from their text to what a measurement takes."""

import re
from typing import TYPE_CHECKING

from biphase.cli import profile_options as options
from biphase.cli.ranges import check_range
from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.experiments.stall import StallPlan

MOST_VICTIMS = 1024
TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
LEAST_ITL_MS, MOST_ITL_MS = 1e-3, 3.6e6
IN_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def make_stall_plan(victims: int, prompt: int, repeats: int, itl_slo: str | None) -> "StallPlan":
    """What to measure; ``BadInput`` names the option that is out of range."""
    from biphase.experiments.stall import StallPlan

    check_range("--victims", victims, 1, MOST_VICTIMS, "streams")
    check_range("--prompt", prompt, 1, options.MOST_TOKENS, "tokens")
    check_range("--repeats", repeats, 1, options.MOST_REPEATS)
    return StallPlan(victims, prompt, repeats, _milliseconds(itl_slo))


def _milliseconds(itl_slo: str | None) -> float | None:
    if itl_slo is None:
        return None
    match = TIME.fullmatch(itl_slo.strip())
    wanted = float(match[1]) * IN_MS[match[2]] if match else 0.0
    if not LEAST_ITL_MS <= wanted <= MOST_ITL_MS:
        raise BadInput(f"--itl-slo {itl_slo!r}: expected a time with its unit, 1us to 3600s, as in 50ms or 0.05s")
    return wanted
