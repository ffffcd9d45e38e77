"""The roofs of this machine for this process's threads: bare loops of ``kernels/roofs.py``, timed."""

from functools import partial
from statistics import median

import numpy as np
from numba import get_num_threads
from numpy.typing import NDArray

from biphase.engine.crossover import timed
from biphase.engine.kernels.features import features
from biphase.engine.kernels.roofs import OPERATIONS, Unit, new_scratch, read, repeat
from biphase.engine.kernels.team import new_team
from biphase.engine.kernels.tiles import whole_tiles
from biphase.roofline.kernel_rates import MEMORY, Roof, Roofs

ROUNDS = {
    Unit.FLOAT32: 100_000,
    Unit.INT8_DOT: 100_000,
    Unit.BF16_DOT: 100_000,
    Unit.INT8_TILES: 8_000,
    Unit.BF16_TILES: 8_000,
}
"""Of a bare loop: a fifth of a millisecond, a hundred times what starting it takes."""


TRIES = 3
"""Of each loop of a unit at a visit; the fastest is the sample, since the first may have to wake threads."""


class BareLoops:
    """The loops of ``kernels/roofs.py`` on this process's threads, and the rates that they have shown."""

    def __init__(self, weights: NDArray[np.uint8]) -> None:
        self._weights = weights
        self._threads = get_num_threads()
        self._team = new_team(self._threads)
        self._scratch = new_scratch(self._threads)
        self._tiles = whole_tiles()
        self._rates: dict[str, list[float]] = {}

    def run(self) -> None:
        """Each unit, then the weights."""
        for unit in units():
            loop = partial(repeat, int(unit), self._threads, ROUNDS[unit], self._tiles, self._scratch)
            self._keep(
                unit.label, self._threads * ROUNDS[unit] * OPERATIONS[unit], min(timed(loop) for _ in range(TRIES))
            )
        at, size = self._weights.ctypes.data, self._weights.nbytes
        self._keep(MEMORY, size, timed(partial(read, self._team.ctypes.data, self._threads, at, size, self._scratch)))

    def _keep(self, name: str, amount: int, seconds: float) -> None:
        self._rates.setdefault(name, []).append(amount / seconds / 1e9)

    def forget(self) -> None:
        """Begin anew, after a warm-up."""
        self._rates.clear()

    def roofs(self) -> Roofs:
        """Of all samples since."""
        found = {name: Roof(median(rates), max(rates)) for name, rates in self._rates.items()}
        return Roofs(found.pop(MEMORY), found)


def units() -> list[Unit]:
    """Those that this processor has."""
    return [unit for unit in Unit if features().tiles or unit not in (Unit.INT8_TILES, Unit.BF16_TILES)]
