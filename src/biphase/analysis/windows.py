"""Decode steps as seen from outside: stretches of time in which the set of decoding streams does not change.

A stretch is taken only where no request waits for its first token: what a prefill does to the decodes beside it is
another question. Within a stretch every stream gets one token a step, so its pace there is a sample of the step time
at a known batch and a known sum of contexts.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from biphase.client.record import Record

FEWEST_TOKENS = 4
"""Tokens each stream must get in a stretch: jitter of one arrival is divided by this number at least."""
SETTLING_TOKENS = 8
"""Tokens of a new stream before a stretch begins, but a quarter of it at most. Over them the way from the server's
write to the stamp shortens by about 0.1 ms, as both processes wake from a longer pause; and the first token comes with
the response's first bytes, by a way of its own."""


class StepSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Step time of one stretch: ``batch`` streams decode, attending to ``context_sum`` tokens in all, in its middle."""

    batch: int
    context_sum: float
    seconds: float
    tokens: int


def step_samples(records: Sequence[Record]) -> list[StepSample]:
    """One sample for each stretch of enough tokens; records without a counted prompt have unknown context: left out."""
    whole = [r for r in records if r.error is None and len(r.token_chunks) > 1]
    known = [r for r in whole if r.prompt_tokens is not None or r.asked_prompt_tokens is not None]
    if len(known) < len(whole):
        return []
    found = (_sample(start, end, known) for start, end in _stretches(records))
    return [sample for sample in found if sample is not None]


def _stretches(records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Between any two moments at which something changes, where nothing is being prefilled."""
    prefills = [(r.sent, r.token_chunks[0].t if r.token_chunks else _end(r)) for r in records]
    edges = {edge for span in prefills for edge in span} | {_end(r) for r in records}
    for start, end in pairwise(sorted(edges)):
        if not any(sent < end and first > start for sent, first in prefills):
            yield start, end


def _end(record: Record) -> float:
    chunks = record.token_chunks
    return chunks[-1].t if chunks else record.ended or record.sent


def _sample(start: float, end: float, records: Sequence[Record]) -> StepSample | None:
    decoding = [r for r in records if r.token_chunks[0].t < end and r.token_chunks[-1].t > start]
    start = max([start, *(_settled(r, start, end) for r in decoding)])
    paces, contexts, tokens = [], 0.0, 0
    for record in decoding:
        chunks = record.token_chunks
        inside = [chunk for chunk in chunks if start <= chunk.t <= end]
        got = sum(chunk.tokens for chunk in inside[1:])
        if got < FEWEST_TOKENS:
            return None
        paces.append((inside[-1].t - inside[0].t) / got)
        before = sum(chunk.tokens for chunk in chunks if chunk.t <= inside[0].t)
        contexts += (record.prompt_tokens or record.asked_prompt_tokens or 0) + before + (got - 1) / 2
        tokens += got
    return StepSample(len(paces), contexts, float(np.median(paces)), tokens) if paces else None


def _settled(record: Record, start: float, end: float) -> float:
    """From when on a stream's stamps are even, if it begins in this stretch."""
    chunks = record.token_chunks
    if chunks[0].t < start:
        return start
    inside = sum(chunk.t <= end for chunk in chunks)
    return chunks[min(SETTLING_TOKENS, max(1, inside // 4), len(chunks) - 1)].t
