"""When requests arrive: at even intervals, as a Poisson or gamma process, or as they did once."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from biphase.errors import BadInput

Process = Literal["constant", "poisson", "gamma"]


def arrivals(
    rate: float, process: Process = "poisson", burstiness: float = 1.0, rng: random.Random | None = None
) -> Iterator[float]:
    """Endless moments in seconds from the start, ``rate`` a second on average, the first at 0.

    ``burstiness`` is the shape of the gamma distribution of the intervals, as in vLLM's bench: 1 is Poisson, below it
    arrivals bunch, above it they even out. ``BadInput`` for values that are not positive and finite.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if not (math.isfinite(value) and value > 0):
            raise BadInput(f"{name} {value:g}: expected a number more than 0")
    return _moments(rate, 1.0 if process == "poisson" else burstiness, process, rng or random.SystemRandom())


def _moments(rate: float, shape: float, process: Process, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1 / rate if process == "constant" else rng.gammavariate(shape, 1 / (rate * shape))


def read_arrivals(path: Path) -> list[float]:
    """Moments from a file, one number of seconds a line, in order; the first becomes 0. ``BadInput`` names the line."""
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read time stamps from {path}: {error}") from error
    found: list[float] = []
    for number, text in enumerate(lines, start=1):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (found and value < found[-1]):
            raise BadInput(f"{path}, time stamp {number}: expected seconds in rising order, found {text!r}")
        found.append(value)
    if not found:
        raise BadInput(f"{path} holds no time stamps; expected a number of seconds on each line")
    return [value - found[0] for value in found]
