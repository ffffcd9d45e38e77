"""What a long prompt does to the streams that decode beside it, read from their raw gaps.

``t_i`` are the arrivals of a stream's chunks with tokens. A gap ``t_i - t_(i-1)`` is quiet when all streams decoded
throughout it and it ended before the prompt was sent; it is during the prefill when it ended after that and began
before the prompt's first token. A stream is stalled for ``sum(gap - quiet median)`` over the gaps during the prefill
that are above it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from biphase.analysis.latency import prefilled_tokens, ttft
from biphase.client.record import Record


class Gap(NamedTuple):
    """From the arrival of one chunk with tokens to the next, in seconds of the client's clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the reader of the stream waited."""
        return self.end - self.start


@dataclass(frozen=True)
class Attack:
    """One arrival of the long prompt among streams that decode."""

    prompt: Record
    victims: tuple[Record, ...]

    @property
    def sent(self) -> float:
        """When the prompt went out."""
        return self.prompt.sent

    @property
    def first_token(self) -> float:
        """When the prompt's first token came: its prefill had ended."""
        return self.prompt.token_chunks[0].t

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that the server had to compute."""
        return prefilled_tokens(self.prompt) or self.prompt.asked_prompt_tokens or 0

    @property
    def all_decode(self) -> float:
        """When the last of the streams had its first token."""
        return max(victim.token_chunks[0].t for victim in self.victims)


def stream_gaps(record: Record) -> list[Gap]:
    """All gaps of a stream; the wait for its first token is none."""
    return [Gap(a.t, b.t) for a, b in pairwise(record.token_chunks)]


def quiet_gaps(attack: Attack) -> list[Gap]:
    """Gaps of all streams before the prompt was sent, while every one of them decoded."""
    start = attack.all_decode
    return [gap for v in attack.victims for gap in stream_gaps(v) if start <= gap.start and gap.end <= attack.sent]


def gaps_during(victim: Record, attack: Attack) -> list[Gap]:
    """Gaps of one stream that the prefill can have lengthened."""
    return [gap for gap in stream_gaps(victim) if gap.end > attack.sent and gap.start < attack.first_token]


def stalled_s(victim: Record, attack: Attack, quiet_s: float) -> float:
    """Seconds by which the prefill held one stream up."""
    return sum(max(0.0, gap.seconds - quiet_s) for gap in gaps_during(victim, attack))


def worst_gap_s(attack: Attack) -> float:
    """The longest wait of any stream; 0 when no stream had a gap during the prefill."""
    return max((gap.seconds for v in attack.victims for gap in gaps_during(v, attack)), default=0.0)


def decoding_when_sent(attack: Attack) -> int:
    """Streams that had begun and not ended when the prompt was sent."""
    return sum(v.token_chunks[0].t <= attack.sent < v.token_chunks[-1].t for v in attack.victims)


def outlasted(attack: Attack) -> int:
    """Streams that still decoded when the prompt's first token came."""
    return sum(v.token_chunks[-1].t >= attack.first_token for v in attack.victims)


def at_once(records: Sequence[Record]) -> int:
    """The most streams that decoded in the middle of one of them: at its ends its neighbours in a queue may overlap."""
    spans = [(r.token_chunks[0].t, r.token_chunks[-1].t) for r in records if r.token_chunks]
    return max((sum(a <= (start + end) / 2 <= b for a, b in spans) for start, end in spans), default=0)


def ttfts_ms(attacks: Sequence[Attack]) -> Iterator[float]:
    """TTFT of the prompt in each attack, in ms."""
    for attack in attacks:
        if (seconds := ttft(attack.prompt)) is not None:
            yield 1e3 * seconds


def typical(attacks: Sequence[Attack]) -> Attack:
    """The attack with the median worst gap: the one to draw."""
    return sorted(attacks, key=worst_gap_s)[(len(attacks) - 1) // 2]


def quiet_median_s(attacks: Sequence[Attack]) -> float | None:
    """Median quiet gap in seconds; None when no gap was quiet."""
    gaps = [gap.seconds for attack in attacks for gap in quiet_gaps(attack)]
    return float(np.median(gaps)) if gaps else None
