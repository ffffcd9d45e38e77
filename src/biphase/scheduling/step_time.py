"""How long a step takes, learnt from the steps themselves: what the ITL budget asks before it adds prefill to decodes.

    decodes alone    seconds = t0 + w * decodes + k * decode context
    with a chunk     seconds = a + v * decodes + l * decode context + b * chunk + r * past + c * chunk pairs

t0 and a read the weights, each by its own kernels; w and v are the work of one more sequence, k and l read one more
token of its KV; b computes one more prompt token, r reads one more token of the chunk's past, c attends one more pair
(new token, earlier token). The constants of the two kinds of step are apart: beside a chunk another row costs a tenth
of what it costs among decodes.

Each step corrects the coefficients by its error, normalised so that the same step again would be predicted with that
share less error (normalised least mean squares; Widrow and Hoff 1960, Nagumo and Noda 1967). Unlike recursive least
squares it stays bounded when the same kind of step comes a thousand times, which is what decoding is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

TYPICAL = (1.0, 8.0, 8e3, 1.0, 8.0, 8e3, 256.0, 2e3, 256e3)
"""Sizes of the features in an ordinary step. Divided by them, all coefficients are seconds of an ordinary step,
and an error is shared out between them by what each contributed."""
RATE = 0.2
"""Share of an error that one step corrects: a change of the machine's speed is followed within about ten steps."""
LARGEST_ERROR = 0.5
"""What one step can be wrong by, as a share of the prediction: a step that was interrupted is not the law."""
FIRST_STEPS = 10
"""Steps of a kind from which on that holds. Before, the n-th corrects the n-th part of its error, if that is more."""
FIRST_PASSES = 300
"""How often the first measurements are gone through: as equations, solved by projecting on each in turn (Kaczmarz)."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: sequences that decode and their context in tokens; prompt tokens, what lies before them
    in their sequences, and their pairs."""

    decodes: int = 0
    decode_context: int = 0
    chunk: int = 0
    pairs: int = 0
    past: int = 0

    def with_chunk(self, count: int, past: int) -> "StepShape":
        """This step and ``count`` prompt tokens more, behind ``past`` computed ones."""
        pairs = self.pairs + count * past + count * (count + 1) // 2
        return StepShape(self.decodes, self.decode_context, self.chunk + count, pairs, self.past + past)

    def features(self) -> tuple[float, ...]:
        """In units of ``TYPICAL``: three of a step of decodes, then six of a step with a chunk; the others are 0."""
        decodes = (1, self.decodes, self.decode_context)
        chunk = (*decodes, self.chunk, self.past, self.pairs)
        raw = (0, 0, 0, *chunk) if self.chunk else (*decodes, 0, 0, 0, 0, 0, 0)
        return tuple(value / size for value, size in zip(raw, TYPICAL, strict=True))


class StepTimeLaw:
    """Predicts the seconds of a step and learns from what it then took; ``first`` are measurements to start from."""

    def __init__(self, first: Sequence[tuple[StepShape, float]] = ()) -> None:
        self._coefficients = [0.0] * len(TYPICAL)
        self._variance = 0.0
        self._seen = {chunked: sum((shape.chunk > 0) == chunked for shape, _ in first) for chunked in (False, True)}
        for _ in range(FIRST_PASSES):
            for shape, seconds in first:
                self._correct(shape.features(), seconds, RATE)
        for shape, seconds in first:
            self._note(shape, seconds)

    @property
    def knows(self) -> bool:
        """Whether there is anything to predict from."""
        return any(self._coefficients)

    @property
    def noise(self) -> float:
        """Standard deviation of recent errors of prediction, as a share of the prediction, of steps with a chunk."""
        return sqrt(self._variance)

    def predict(self, shape: StepShape) -> float:
        """Seconds of such a step."""
        return self._at(shape.features())

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Take one step into account."""
        predicted, kind = self.predict(shape), shape.chunk > 0
        self._seen[kind] += 1
        if self._seen[kind] > FIRST_STEPS:
            seconds = min(max(seconds, predicted * (1 - LARGEST_ERROR)), predicted * (1 + LARGEST_ERROR))
        self._note(shape, seconds)
        self._correct(shape.features(), seconds, max(RATE, 1 / self._seen[kind]))

    def share(self, shape: StepShape, seconds: float) -> tuple[float, float]:
        """The (prefill, decode) seconds of a step: measured where it has one phase, shared out where it has both.

        A mixed step's decode part is what the decodes alone are predicted to take, as a share of the whole prediction:
        reading the weights, which decode needs anyway, counts as decode.
        """
        if not shape.decodes or not shape.chunk:
            return (0.0, seconds) if shape.decodes else (seconds, 0.0)
        whole = self.predict(shape)
        alone = self.predict(StepShape(shape.decodes, shape.decode_context))
        known = 0 < alone < whole
        part = alone / whole if known else shape.decodes / (shape.decodes + shape.chunk)
        return seconds * (1 - part), seconds * part

    def largest_chunk(self, shape: StepShape, past: int, most: int, seconds: float) -> int:
        """The most prompt tokens behind ``past`` that keep such a step within ``seconds``; 0 when none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(shape.with_chunk(middle, past)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _note(self, shape: StepShape, seconds: float) -> None:
        """Book the error of a prediction."""
        predicted = self.predict(shape)
        if shape.chunk and predicted:
            self._variance += RATE * ((seconds / predicted - 1) ** 2 - self._variance)

    def _at(self, features: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self._coefficients, features, strict=True))

    def _correct(self, features: Sequence[float], seconds: float, rate: float) -> None:
        step = rate * (seconds - self._at(features)) / sum(x * x for x in features)
        self._coefficients = [max(c + step * x, 0.0) for c, x in zip(self._coefficients, features, strict=True)]
