"""The size of the chunks in which a server prefills, recovered from the gaps of streams that decode beside a prompt.

Each pass of the engine that holds a chunk of the prompt gives every decoding stream one token, late. A prompt of ``S``
tokens in chunks of ``C`` thus raises ``ceil(S / C)`` gaps. The count is independent of how fast the machine is, and
counts for prompts of different lengths narrow ``C`` down.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from biphase.analysis.stall import Attack, gaps_during
from biphase.client.record import Record

RAISED = 1.5
"""Times the quiet gap from which a gap may hold a chunk."""
RAISED_SHARE = 0.3
"""Part of what a full chunk adds to a gap from which another gap is taken to hold one too: attention makes late chunks
of a prompt several times as dear as the first."""
NARROW = 1.1
"""Ratio of the bounds from which their geometric mean is within 5 % of the size."""
MOST_WIDE = 2.0
"""Ratio of the bounds from which no size was found, only a range."""
DISAGREE = 0.15
"""Mean relative error of the counts from which no single size explains them."""


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt, and the passes in which it was prefilled, as the streams beside it felt them."""

    prompt_tokens: int
    passes: int


class Chunking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``chunk_tokens`` explains the counts best, and so does every size from ``least`` to ``most``.

    With one pass a prompt all three are None: the server does not chunk below the longest prompt, or lets no decode
    between its chunks. Tokens are the prompt's: an engine whose budget covers decodes too has one more for each stream.
    ``agree``: counts that the size explains exactly.
    """

    chunk_tokens: int | None
    least: int | None
    most: int | None
    agree: int
    single_size: bool
    counts: tuple[Counted, ...]

    @property
    def found(self) -> bool:
        """Whether the counts leave one size, and not a range of them in which the middle one is as good as any."""
        return self.least is not None and self.most is not None and is_narrow(self.least, self.most)


def is_narrow(least: int, most: int) -> bool:
    """Whether a range of sizes is narrow enough to be called about so many tokens."""
    return most <= MOST_WIDE * least


def count_passes(attack: Attack, quiet_s: float) -> int:
    """Passes that held a chunk of the prompt: the median over the streams that saw its whole prefill; 0 if none did."""
    first = attack.first_token
    whole = [v for v in attack.victims if v.token_chunks[0].t <= attack.sent and v.token_chunks[-1].t >= first]
    return round(float(np.median([_felt(victim, attack, quiet_s) for victim in whole]))) if whole else 0


def _felt(victim: Record, attack: Attack, quiet_s: float) -> int:
    """Raised gaps of one stream, and a last one that was not: a small rest of the prompt hardly lengthens its pass."""
    gaps = gaps_during(victim, attack)
    if not gaps:
        return 0
    threshold = _threshold([gap.seconds for gap in gaps], quiet_s)
    # the first token leaves the engine with the tokens of the last pass; what comes later is decoding again
    last = min(range(len(gaps)), key=lambda n: abs(gaps[n].end - attack.first_token))
    raised = [gap.seconds > threshold for gap in gaps[: last + 1]]
    rest = len(raised) > 1 and raised[-2] and not raised[-1]
    return sum(raised) + rest


def _threshold(seconds: Sequence[float], quiet_s: float) -> float:
    raised = [s for s in seconds if s > RAISED * quiet_s]
    added = float(np.median(raised)) - quiet_s if raised else 0.0
    return max(RAISED * quiet_s, quiet_s + RAISED_SHARE * added)


def recover(counts: Sequence[Counted]) -> Chunking | None:
    """The size that explains the counts with the least relative error; None when no stream felt anything."""
    felt = [count for count in counts if count.passes > 0]
    if not felt:
        return None
    if max(count.passes for count in felt) == 1:
        nothing = {"chunk_tokens": None, "least": None, "most": None}
        return Chunking(**nothing, agree=len(felt), single_size=True, counts=tuple(counts))
    sizes = _candidates(felt)
    errors = np.mean([np.abs(-(-c.prompt_tokens // sizes) - c.passes) / c.passes for c in felt], axis=0)
    best = sizes[errors <= errors.min() + 1e-9]
    least, most = int(best[0]), int(best[-1])
    size = round(math.sqrt(least * most))
    return Chunking(
        chunk_tokens=size,
        least=least,
        most=most,
        agree=sum(_passes(c, size) == c.passes for c in felt),
        single_size=bool(errors.min() <= DISAGREE),
        counts=tuple(counts),
    )


def _passes(count: Counted, size: int) -> int:
    return -(-count.prompt_tokens // size)


def _candidates(counts: Sequence[Counted]) -> npt.NDArray[np.int64]:
    """All sizes that some count allows."""
    least = min(_passes(c, c.passes) for c in counts)
    most = max(c.prompt_tokens if c.passes == 1 else -(-c.prompt_tokens // (c.passes - 1)) - 1 for c in counts)
    return np.arange(least, max(least, most) + 1, dtype=np.int64)


def next_probe(found: Chunking) -> int | None:
    """A prompt length whose count halves the range of sizes; None when it is narrow, or the counts disagree.

    With ``k`` chunks of the middle size, a server with larger chunks runs ``k`` passes and one with smaller ``k + 1``.
    """
    if found.least is None or found.most is None or found.most <= NARROW * found.least or not found.single_size:
        return None
    longest = max(found.counts, key=lambda c: c.prompt_tokens)
    middle = math.sqrt(found.least * found.most)
    return round(max(1.0, longest.prompt_tokens // middle) * middle)
