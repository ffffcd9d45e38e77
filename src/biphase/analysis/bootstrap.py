"""Non-negative relative least squares, robust against single outliers, with bootstrap intervals.

A sample of a time ``y`` is explained by ``sum_j x_j coefficient_j``. What is minimised is the relative error
``sum ((y - fit) / y)^2`` with Huber's weights, so that a prompt of one token counts as much as one of 8192. The
intervals come from a wild bootstrap (Wu 1986, Rademacher signs) of residuals divided by 1 - leverage (HC3), which
allows for noise that grows with the time, widened by Student's t for the samples that speak for the least supported
constant. They are simultaneous: with 95 % confidence all constants of a law lie in theirs. An error that no scatter
shows, times that are all a little too long, is given room apart (``late``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Vector = npt.NDArray[np.float64]

REPLICATES = 1000
CONFIDENCE = 0.95
_HUBER = 1.345  # 95 % efficiency on normal noise
_NORMAL_MAD = 1.4826  # standard deviation over median absolute deviation of normal noise
_ROUNDS = 20


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted constant, in the unit that its name says, with its interval: 95 % for all constants of the fit."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Fit:
    """Coefficients, one bootstrap replicate of them a row, and relative residuals ``(y - fit) / y`` of the samples.

    ``late`` [samples, coefficients]: by how much each sample's possible lateness alone moves a coefficient.
    """

    coefficients: Vector
    replicates: Vector
    residuals: Vector
    weights: Vector
    widening: float
    late: Vector

    def estimate(self, of: Callable[[Vector], Vector]) -> Estimate:
        """Any function of the coefficients (last axis) that is never below zero, with its interval."""
        value = float(of(self.coefficients[None, :])[0])
        return self.interval(value, of(self.replicates), of)

    def coefficient(self, number: int) -> Estimate:
        """One constant with its interval; none is below zero."""
        return self.estimate(lambda rows: rows[..., number])

    def interval(self, value: float, replicates: Vector, of: Callable[[Vector], Vector]) -> Estimate:
        """``interval`` with room for lateness, whatever its part in each sample: ``of`` moves by what they move it."""
        found = interval(value, replicates, self.widening)
        moved = of(self.coefficients + self.late) - of(self.coefficients[None, :])
        low, high = found.low - moved[moved > 0].sum(), found.high - moved[moved < 0].sum()
        return Estimate(value, max(float(low), 0.0), max(float(high), 0.0))

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals, outliers as Huber weighs them."""
        return float(np.sqrt(np.average(self.residuals**2, weights=self.weights)))


def interval(value: float, replicates: Vector, widening: float = 1.0) -> Estimate:
    """Percentile interval of bootstrap replicates around ``value``, its arms ``widening`` times as long."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(replicates, [tail, 100 - tail])
    arms = (min(value - widening * (value - low), value), max(value + widening * (high - value), value))
    return Estimate(value, float(arms[0]), float(arms[1]))


def fit_relative(design: npt.ArrayLike, times: npt.ArrayLike, late: float = 0.0, seed: int = 0) -> Fit:
    """Fit ``times`` (n,) by a non-negative combination of the columns of ``design`` (n, p), n > p.

    Each time may be too long by up to ``late``; by how much is not known.

    Raises ``ValueError`` with fewer samples than constants plus one, or with a time that is not positive.
    """
    x, y = np.asarray(design, float), np.asarray(times, float)
    if len(y) <= x.shape[1]:
        raise ValueError(f"{x.shape[1]} constants need {x.shape[1] + 1} samples, not {len(y)}")
    if not (y > 0).all():
        raise ValueError("times must be positive")
    relative = x / y[:, None]
    scale = np.linalg.norm(relative, axis=0)
    unit = relative / scale
    solution, weights = _robust(unit)
    residuals = 1 - unit @ solution
    rows = _wild_bootstrap(unit, solution, residuals, weights, np.random.default_rng(seed))
    pull = _pull(unit, weights)
    moved = (pull / scale[:, None] * late / y).T
    return Fit(solution / scale, rows / scale, residuals, weights, _widening(pull, weights), moved)


def _pull(unit: Vector, weights: Vector) -> Vector:
    """[constants, samples]: by how much each constant grows with the relative error of each sample."""
    root = np.sqrt(weights)
    return np.asarray(np.linalg.pinv(unit * root[:, None]) * root, float)


def _widening(pull: Vector, weights: Vector) -> float:
    """How much longer the arms of the intervals are than the bootstrap's.

    Student's t over the normal quantile, with the degrees of freedom of the constant that has fewest (Satterthwaite:
    five samples of the longest prompt may be all that speaks for ``c``, and an error there moves the others too), at
    the level at which all constants together are held with ``CONFIDENCE`` (Bonferroni); and Huber's variance, which
    has the share of unclipped residuals where weighted least squares has the mean weight.
    """
    square = pull**2
    freedom = square.sum(axis=1) ** 2 / (square**2).sum(axis=1) - 1
    together = 1 - (1 - CONFIDENCE) / (2 * len(pull))
    student = stats.t.ppf(together, max(float(freedom.min()), 1.5)) / stats.norm.ppf(0.5 + CONFIDENCE / 2)
    return float(student * weights.mean() / max(float(np.mean(weights == 1.0)), 0.5))


def _robust(unit: Vector) -> tuple[Vector, Vector]:
    """Huber's estimate by reweighting: the coefficients and the last weights."""
    weights = np.ones(len(unit))
    solution = _solve(unit, np.ones(len(unit)), weights)
    for _ in range(_ROUNDS):
        residuals = 1 - unit @ solution
        # as many residuals as constants can be small by the fit's own doing: they tell nothing of the noise
        sigma = _NORMAL_MAD * float(np.median(np.sort(np.abs(residuals))[unit.shape[1] - 1 :]))
        if sigma < 1e-12:  # exact data: nothing to down-weight
            break
        weights = np.minimum(1.0, _HUBER * sigma / np.maximum(np.abs(residuals), 1e-300))
        previous, solution = solution, _solve(unit, np.ones(len(unit)), weights)
        if np.allclose(previous, solution, rtol=1e-9, atol=0):
            break
    return solution, weights


def _solve(unit: Vector, target: Vector, weights: Vector) -> Vector:
    root = np.sqrt(weights)
    solution: Vector = optimize.nnls(unit * root[:, None], target * root)[0]
    return solution


def _wild_bootstrap(
    unit: Vector, solution: Vector, residuals: Vector, weights: Vector, rng: np.random.Generator
) -> Vector:
    root = np.sqrt(weights)
    q = np.linalg.qr(unit * root[:, None])[0]
    leverage = np.minimum((q**2).sum(axis=1), 0.9)
    # the weights stay those of the fit: an outlier moves no replicate further than it moved the fit
    noise = residuals / (1 - leverage)
    targets = unit @ solution + rng.choice((-1.0, 1.0), (REPLICATES, len(unit))) * noise
    rows: Vector = np.linalg.lstsq(unit * root[:, None], (targets * root).T, rcond=None)[0].T
    for number in np.flatnonzero((rows < 0).any(axis=1)):
        rows[number] = _solve(unit, targets[number], weights)
    return rows
