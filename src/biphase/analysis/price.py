"""What a million input and a million output tokens cost: the price of the machine, split as its time was.

Phase time is engine-seconds: from the server's own counters where it has them, else modelled. Modelled, a prefill of S
uncached tokens takes ``a + b S + c S^2`` of the fitted law, and a token of a stream at a context takes its share of a
decode step: ``(t0 + w B) / B + k context``, B the streams that decoded at that moment.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from biphase.analysis.goodput import uncached
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.phase_split import split, windows
from biphase.analysis.split_engines import recognise
from biphase.client.record import Record
from biphase.client.scrape import Scrape

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


class PhaseTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine-seconds of each phase over a level; ``source``: counted by the server, or modelled; ``how``: from what."""

    prefill_s: float
    decode_s: float
    source: Literal["measured", "modelled"]
    how: str


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In the currency of ``per_hour``. ``*_per_million``: the whole bill of the window, idle time too, split by phase
    time; ``*_at_full_use``: the engine-seconds alone. ``output_to_input`` is their ratio, the same for both.

    Input tokens are all prompt tokens, those that a prefix cache answered too. ``busy``: engine-seconds over seconds.
    """

    per_hour: float
    phase_time: PhaseTime
    prefill_share: float
    busy: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    input_per_million: float
    output_per_million: float
    input_at_full_use: float
    output_at_full_use: float
    output_to_input: float


def price(per_hour: float, time: PhaseTime, records: Sequence[Record], seconds: float) -> Price | None:
    """The price of the tokens of ``records``, sent within ``seconds`` in which ``time`` was spent.

    None where a phase took no time or made no token. The first token of an answer comes out of the prefill and is an
    output token all the same: that is how tokens are sold.
    """
    inputs = sum(r.prompt_tokens or r.asked_prompt_tokens or 0 for r in records if r.token_chunks)
    outputs = sum(chunk.tokens for r in records for chunk in r.token_chunks)
    engine = time.prefill_s + time.decode_s
    if not inputs or not outputs or time.prefill_s <= 0 or time.decode_s <= 0 or seconds <= 0:
        return None
    per_second = per_hour / SECONDS_PER_HOUR
    share = time.prefill_s / engine
    return Price(
        per_hour=per_hour,
        phase_time=time,
        prefill_share=share,
        busy=engine / seconds,
        input_tokens=inputs,
        cached_tokens=sum(r.cached_tokens or 0 for r in records if r.token_chunks),
        output_tokens=outputs,
        input_per_million=MILLION * per_second * seconds * share / inputs,
        output_per_million=MILLION * per_second * seconds * (1 - share) / outputs,
        input_at_full_use=MILLION * per_second * time.prefill_s / inputs,
        output_at_full_use=MILLION * per_second * time.decode_s / outputs,
        output_to_input=(time.decode_s / outputs) / (time.prefill_s / inputs),
    )


def phase_time(before: Scrape, after: Scrape) -> PhaseTime | None:
    """Engine-seconds that the server counted between two scrapes; None where it tells one phase or none of them, or
    was started anew in between."""
    engine = recognise(after)
    stretches = windows(engine, [before, after]) if engine is not None else []
    if engine is None or len(stretches) != 1:
        return None
    found = split(engine, stretches[0]).engine_s
    if found.prefill is None or found.decode is None or found.origin != "counted":
        return None
    how = f"{engine.name}: {found.prefill.source}, {found.decode.source}"
    return PhaseTime(found.prefill.value, found.decode.value, "measured", how)


def modelled(records: Sequence[Record], prefill: PrefillLaw, decode: DecodeLaw) -> PhaseTime:
    """Engine-seconds that the laws give for these records."""
    http = prefill.http_ms or 0.0
    prefill_ms = sum(prefill.ms(uncached(r) or 0) - http for r in records if r.token_chunks)
    decode_ms = _decode_ms(records, decode)
    batches = ", ".join(map(str, decode.batches))
    how = f"laws fitted to prompts up to {prefill.longest_tokens} tokens and to batches of {batches}, measured before"
    return PhaseTime(prefill_ms / 1e3, decode_ms / 1e3, "modelled", how)


def _decode_ms(records: Sequence[Record], law: DecodeLaw) -> float:
    streams = [r.token_chunks for r in records if len(r.token_chunks) > 1]
    edges = sorted([(chunks[0].t, 1) for chunks in streams] + [(chunks[-1].t, -1) for chunks in streams])
    moments, counts = [t for t, _ in edges], list(accumulate(step for _, step in edges))
    total = 0.0
    for record in records:
        context = record.prompt_tokens or record.asked_prompt_tokens or 0
        for number, chunk in enumerate(record.token_chunks):
            if number:
                # at its own last token a stream still counts: look just before the moment
                at = max(0, bisect_right(moments, chunk.t - 1e-9) - 1)
                batch = max(1, counts[at])
                total += chunk.tokens * _share_ms(law, batch, context)
            context += chunk.tokens
    return total


def _share_ms(law: DecodeLaw, batch: int, context: int) -> float:
    """One stream's part of a decode step."""
    per_sequence = law.w_ms_per_sequence.value if law.w_ms_per_sequence else 0.0
    per_token = law.k_ms_per_token.value if law.k_ms_per_token else 0.0
    return law.t0_ms.value / batch + per_sequence + per_token * context
