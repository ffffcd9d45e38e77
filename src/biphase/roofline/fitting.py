"""The time law of a matrix product, fitted to timings, and what a calibration consists of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from biphase.errors import RunFailed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timing:
    """One matrix product: rows, FLOPs, bytes moved (weights, input, output), seconds."""

    rows: int
    flops: float
    moved_bytes: float
    seconds: float


@dataclass(frozen=True)
class Law:
    """t = launch + max(bytes / (memory·bandwidth), FLOPs / (compute·peak)); ``error`` is the median relative one."""

    dtype: str
    launch_s: float
    memory: float
    compute: float
    error: float

    def seconds(self, timing: Timing, bandwidth: float, peak: float) -> float:
        """What the law says of a product."""
        moved, worked = timing.moved_bytes / (self.memory * bandwidth), timing.flops / (self.compute * peak)
        return self.launch_s + max(moved, worked)


@dataclass(frozen=True)
class Calibrated:
    """The law of one dtype with one library, and its median relative error on the timings."""

    engine: str
    law: Law
    peak_flops: float
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Calibration:
    """What was measured. Rates in bytes and FLOPs per second.

    ``foreign_cores``: cores that other processes kept busy meanwhile, in the mean; None where the system does not say.
    """

    hardware: str
    software: str
    cores: int
    foreign_cores: float | None
    memory_bytes: int
    bandwidth: float
    calibrated: tuple[Calibrated, ...]
    seconds: float
    skipped: tuple[str, ...]


def fit_law(dtype: str, timings: Sequence[Timing], bandwidth: float, peak: float) -> Law:
    """Least squares of relative errors; ``bandwidth`` and ``peak`` are the best rates seen, so fractions end at 1.

    Which side of the max a timing lies on is unknown: timings are sorted by intensity, every split into a memory-bound
    and a compute-bound part is tried, and the one with the least error is taken. Exact for any number of timings.
    """
    if len(timings) < 3:
        raise RunFailed(f"{len(timings)} timings of {dtype} products are too few for three constants")
    ordered = sorted(timings, key=lambda t: t.flops / t.moved_bytes)
    laws = [_split(dtype, ordered, cut, bandwidth, peak) for cut in range(1, len(ordered))]
    return min(laws, key=lambda law: _loss(law, ordered, bandwidth, peak))


def _split(dtype: str, ordered: Sequence[Timing], cut: int, bandwidth: float, peak: float) -> Law:
    """The law when the first ``cut`` timings are bound by memory and the rest by compute."""
    seconds = np.array([t.seconds for t in ordered])
    bound = np.arange(len(ordered)) < cut
    moved = np.array([t.moved_bytes for t in ordered]) / bandwidth * bound
    worked = np.array([t.flops for t in ordered]) / peak * ~bound
    # relative errors: divide each equation by its time
    columns: Floats = np.stack([np.ones_like(seconds), moved, worked], axis=1) / seconds[:, None]
    launch, slow_memory, slow_compute = _at_least(columns, np.array([0.0, 1.0, 1.0]))
    law = Law(dtype, launch, 1 / slow_memory, 1 / slow_compute, 0.0)
    errors = [abs(law.seconds(t, bandwidth, peak) / t.seconds - 1) for t in ordered]
    return Law(dtype, law.launch_s, law.memory, law.compute, float(np.median(errors)))


def _at_least(columns: Floats, least: Floats) -> tuple[float, float, float]:
    """Least squares of columns·x = 1 with x >= least: the best of all choices of which bounds bind."""
    best, best_loss = least, float("inf")
    for mask in range(8):
        free = np.array([bool(mask >> i & 1) for i in range(3)])
        x = least.copy()
        if free.any():
            rest = 1.0 - columns[:, ~free] @ least[~free]
            x[free] = np.linalg.lstsq(columns[:, free], rest, rcond=None)[0]
        loss = float(np.sum((columns @ x - 1.0) ** 2))
        if np.all(x >= least) and loss < best_loss:
            best, best_loss = x, loss
    return float(best[0]), float(best[1]), float(best[2])


def _loss(law: Law, timings: Sequence[Timing], bandwidth: float, peak: float) -> float:
    return sum((law.seconds(t, bandwidth, peak) / t.seconds - 1) ** 2 for t in timings)
