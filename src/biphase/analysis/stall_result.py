"""What ``biphase stall`` found, as a result: one entry for each server, from the records of its attacks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from biphase.analysis.chunk_advice import ChunkAdvice, advise
from biphase.analysis.chunk_size import Chunking, Counted, count_passes, recover
from biphase.analysis.latency import Spread, percentile, spread, ttft
from biphase.analysis.laws import fit_prefill, http_share
from biphase.analysis.stall import (
    Attack,
    gaps_during,
    quiet_gaps,
    quiet_median_s,
    stalled_s,
    stream_gaps,
    ttfts_ms,
    typical,
)
from biphase.analysis.stall_verdicts import stall_verdicts
from biphase.analysis.verdicts import Verdict
from biphase.client.record import Record, RunFacts

NO_LAW = "no chunk size is advised: too few prompts of different lengths, or no quiet gap, to fit the laws to"


class Gaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gaps of all streams pooled, none averaged, in ms."""

    median: float
    p99: float
    worst: float
    n: int


class StreamTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stream: when each of its gaps ended, in seconds since the prompt was sent, and how long it was."""

    end_s: tuple[float, ...]
    gap_ms: tuple[float, ...]


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attack with the median worst gap: the prompt was sent at 0 and its first token came at ``prefill_s``."""

    prefill_s: float
    streams: tuple[StreamTrace, ...]


class ServerStall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one server did to its streams. ``victims`` decoded, of ``asked_victims``; ``prompt_tokens`` as counted.

    ``quiet_gap_ms``: before the prompt came, all streams decoding. ``prefill_gap_ms``: while it was prefilled; its
    ``worst`` over the quiet median is ``worst_over_quiet``. ``stalled_s_per_stream``: excess over the quiet median,
    summed over a stream's gaps during one prefill. ``ttft_alone_ms``: of the same prompt with nothing beside it.
    """

    name: str
    url: str
    model: str
    asked_victims: int
    victims: int
    asked_prompt_tokens: int
    prompt_tokens: int
    attacks: int
    quiet_gap_ms: Gaps | None
    prefill_gap_ms: Gaps | None
    worst_over_quiet: float | None
    stalled_s_per_stream: Spread | None
    ttft_ms: Spread | None
    ttft_alone_ms: Spread | None
    chunking: Chunking | None
    advice: ChunkAdvice | None
    timeline: Timeline | None
    client_lag_ms: float
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    error: str | None = None


class StallResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON of ``biphase stall --json`` is this type, with units in the names of the keys."""

    biphase: str
    command: str
    versions: dict[str, str]
    started: str
    victims: int
    prompt_tokens: int
    repeats: int
    itl_slo_ms: float | None
    servers: tuple[ServerStall, ...]
    error: str | None = None


@dataclass
class StallRecords:
    """What one server answered so far. ``alone``: long and shorter prompts with nothing beside them; ``quiet``:
    streams without a prompt; ``attacks``: with the prompt asked for; ``probes``: with shorter ones."""

    alone: list[Record] = field(default_factory=list)
    quiet: list[Record] = field(default_factory=list)
    attacks: list[Attack] = field(default_factory=list)
    probes: list[Attack] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """What was asked of a server: streams, tokens of the prompt, the ITL that is wanted; its name in the report."""

    name: str
    victims: int
    prompt: int
    itl_slo_ms: float | None = None


def analyse_stall(
    asked: Asked, facts: RunFacts, records: StallRecords, slots: int | None = None, notes: Sequence[str] = ()
) -> ServerStall:
    """Everything the records of one server say; ``slots``: streams that it decodes at once, where fewer than asked."""
    attacks, quiet_s = records.attacks, quiet_median_s(records.attacks)
    during = [gap.seconds for a in attacks for v in a.victims for gap in gaps_during(v, a)]
    prompt = round(float(np.median([a.prompt_tokens for a in attacks]))) if attacks else 0
    chunking = recover_chunks([*attacks, *records.probes], quiet_s)
    advice = _advice(asked, facts, records, quiet_s, prompt, chunking)
    notes = [*notes, *([NO_LAW] if asked.itl_slo_ms and attacks and advice is None else [])]
    return ServerStall(
        name=asked.name,
        url=facts.url,
        model=facts.model,
        asked_victims=asked.victims,
        victims=max((len(a.victims) for a in attacks), default=0),
        asked_prompt_tokens=asked.prompt,
        prompt_tokens=prompt,
        attacks=len(attacks),
        quiet_gap_ms=_pooled([gap.seconds for a in attacks for gap in quiet_gaps(a)]),
        prefill_gap_ms=_pooled(during),
        worst_over_quiet=max(during) / quiet_s if quiet_s and during else None,
        stalled_s_per_stream=spread(stalled_s(v, a, quiet_s) for a in attacks for v in a.victims) if quiet_s else None,
        ttft_ms=spread(ttfts_ms(attacks)),
        ttft_alone_ms=spread((ttft(r) for r in _as_long(records, attacks)), 1e3),
        chunking=chunking,
        advice=advice,
        timeline=_timeline(typical(attacks)) if attacks else None,
        client_lag_ms=1e3 * max((v.client_lag for a in attacks for v in a.victims), default=0.0),
        notes=(*notes, *facts.notes),
        verdicts=tuple(stall_verdicts(asked.victims, slots, facts, records.quiet, attacks, records.alone)),
        error=facts.error,
    )


def recover_chunks(attacks: Sequence[Attack], quiet_s: float | None) -> Chunking | None:
    """The size of the chunks by the counts of all attacks; None when no stream felt a prefill."""
    if quiet_s is None:
        return None
    return recover([Counted(attack.prompt_tokens, count_passes(attack, quiet_s)) for attack in attacks])


def _pooled(seconds: Sequence[float]) -> Gaps | None:
    if not seconds:
        return None
    median, p99, worst = (1e3 * percentile(seconds, percent) for percent in (50, 99, 100))
    return Gaps(median, p99, worst, len(seconds))


def _as_long(records: StallRecords, attacks: Sequence[Attack]) -> list[Record]:
    """Prompts of the attacks' length that were sent alone."""
    lengths = {attack.prompt.asked_prompt_tokens for attack in attacks}
    return [r for r in records.alone if r.asked_prompt_tokens in lengths]


def _advice(
    asked: Asked,
    facts: RunFacts,
    records: StallRecords,
    quiet_s: float | None,
    prompt: int,
    chunking: Chunking | None,
) -> ChunkAdvice | None:
    if asked.itl_slo_ms is None or quiet_s is None:
        return None
    own = _own_chunk(chunking, prompt)
    law = fit_prefill(records.alone, http_share(records.alone, facts.http_round_trip_s), own)
    if law is None:
        return None
    return advise(law, 1e3 * quiet_s, prompt, asked.itl_slo_ms, own)


def _own_chunk(chunking: Chunking | None, prompt: int) -> int | None:
    """The size of the server's chunks, all of the prompt where that ran whole; None where it is not known."""
    if chunking is None or not chunking.single_size:
        return None
    if chunking.chunk_tokens is None:
        return prompt
    return chunking.chunk_tokens if chunking.found else None


def _timeline(attack: Attack) -> Timeline:
    traces = []
    for victim in attack.victims:
        gaps = stream_gaps(victim)
        ends, lengths = (g.end - attack.sent for g in gaps), (1e3 * g.seconds for g in gaps)
        traces.append(StreamTrace(tuple(round(t, 5) for t in ends), tuple(round(ms, 3) for ms in lengths)))
    return Timeline(attack.first_token - attack.sent, tuple(traces))
