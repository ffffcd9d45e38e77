"""A profile as a result: what the records of one run say, the same from a live server and from a file of records."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from biphase.analysis.chunk_probe import ChunkedPrefill, chunked_prefill, not_probes
from biphase.analysis.floor import Comparison, compare_with_floor
from biphase.analysis.latency import (
    Spread,
    chunk_gaps,
    decode_rate,
    e2e,
    itl,
    percentile,
    prefill_rate,
    spread,
    tpot,
    ttft,
)
from biphase.analysis.laws import DecodeLaw, PrefillLaw, fit_decode, fit_prefill, http_share
from biphase.analysis.server_side import ServerSide, server_side
from biphase.analysis.verdicts import Verdict, faster_than_floor, foreign_traffic, verdicts
from biphase.analysis.vllm_keys import vllm_keys
from biphase.client.record import LeftOut, Record, RunFacts
from biphase.roofline.architecture import Architecture
from biphase.roofline.hardware import Device

HISTOGRAM_BINS = 40
SATURATED = 0.9
"""Prefill is saturated at the smallest length whose rate is at least this part of the best one."""


class LengthRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured at one prompt length: ``prompt_tokens`` as asked for, ``counted_tokens`` by the server."""

    prompt_tokens: int
    counted_tokens: int | None
    requests: int
    ttft_ms: Spread
    prefill_tok_per_s: Spread | None
    decode_ms_per_token: Spread | None
    decode_tok_per_s: Spread | None
    e2e_ms: Spread


class Itl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inter-token latencies of all requests pooled; ``worst_gap`` is the longest wait between two chunks.

    ``histogram``: (from ms, to ms, latencies), bins of equal width in the logarithm.
    """

    median: float
    p99: float
    worst_gap: float
    n: int
    histogram: tuple[tuple[float, float, int], ...] = ()


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where prefill throughput stops rising: ``prompt_tokens`` is None when the longest length still gains markedly."""

    prompt_tokens: int | None
    best_tok_per_s: float


class ProfileResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A profile; the JSON of ``biphase profile --json`` is this type, with units in the names of the keys.

    ``vllm_bench`` holds vLLM's keys; in the JSON they stand at the top level.
    """

    biphase: str
    command: str
    versions: dict[str, str]
    started: str
    url: str
    model: str
    tokens: int
    repeats: int
    rows: tuple[LengthRow, ...]
    left_out: tuple[LeftOut, ...]
    itl_ms: Itl | None
    prefill_saturation: Saturation | None
    prefill_law: PrefillLaw | None
    decode_law: DecodeLaw | None
    chunked_prefill: ChunkedPrefill | None
    comparison: Comparison | None
    http_round_trip_ms: Spread | None
    http_round_trip_path: str
    client_lag_ms: float
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    vllm_bench: dict[str, float | int | str]
    server_side: ServerSide | None = None
    error: str | None = None


@dataclass(frozen=True)
class Hardware:
    """The model's shape and the device that the user named, to compare with."""

    architecture: Architecture
    device: Device
    tp: int = 1

    def compare(
        self,
        prefill: PrefillLaw | None,
        decode: DecodeLaw | None,
        lengths: Sequence[int],
        network_itl_ms: float | None = None,
    ) -> Comparison:
        """The laws beside the floors of this model on this device; ``network_itl_ms``: the network's part of a step."""
        return compare_with_floor(self.architecture, self.device, prefill, decode, lengths, self.tp, network_itl_ms)


def analyse(facts: RunFacts, records: Sequence[Record], hardware: Hardware | None = None) -> ProfileResult:
    """Everything that records of one run say; warm-ups and failed requests are no part of it."""
    good = [r for r in records if not r.warmup and r.error is None]
    alone = [r for r in good if r.concurrency == 1]
    rows = tuple(_row(length, [r for r in alone if r.asked_prompt_tokens == length]) for length in _lengths(alone))
    laws = fit_prefill(alone, http_share(alone, facts.http_round_trip_s)), fit_decode(not_probes(good))
    generated = sum(r.completion_tokens or 0 for r in records)
    counted = server_side(facts.server, records)
    network = counted.network_itl_ms if counted else None
    comparison = hardware.compare(*laws, [row.prompt_tokens for row in rows], network) if hardware else None
    foreign = foreign_traffic(facts.foreign_tokens, generated, facts.busy_before)
    beaten = faster_than_floor(comparison.impossible if comparison else ())
    return ProfileResult(
        biphase=facts.versions.get("biphase", ""),
        command=facts.command,
        versions=facts.versions,
        started=facts.started,
        url=facts.url,
        model=facts.model,
        tokens=facts.tokens,
        repeats=facts.repeats,
        rows=rows,
        left_out=facts.left_out,
        itl_ms=pooled_itl(alone),
        prefill_saturation=saturation(rows),
        prefill_law=laws[0],
        decode_law=laws[1],
        chunked_prefill=chunked_prefill(good),
        comparison=comparison,
        http_round_trip_ms=spread(facts.http_round_trip_s, 1e3),
        http_round_trip_path=facts.http_round_trip_path,
        server_side=counted,
        client_lag_ms=1e3 * max((r.client_lag for r in alone), default=0.0),
        notes=facts.notes,
        verdicts=(*filter(None, (foreign, beaten)), *verdicts(alone, facts.own_tokens)),
        vllm_bench=dict(vllm_keys(alone, facts.model, facts.started)),
        error=facts.error,
    )


def _lengths(records: Sequence[Record]) -> list[int]:
    return sorted({r.asked_prompt_tokens for r in records if r.asked_prompt_tokens is not None})


def _row(length: int, records: Sequence[Record]) -> LengthRow:
    counted = spread(r.prompt_tokens for r in records)
    first, whole = spread(map(ttft, records), 1e3), spread(map(e2e, records), 1e3)
    assert first is not None  # a record without a token is a failure and is none of these
    assert whole is not None
    return LengthRow(
        prompt_tokens=length,
        counted_tokens=round(counted.median) if counted else None,
        requests=len(records),
        ttft_ms=first,
        prefill_tok_per_s=spread(map(prefill_rate, records)),
        decode_ms_per_token=spread(map(tpot, records), 1e3),
        decode_tok_per_s=spread(map(decode_rate, records)),
        e2e_ms=whole,
    )


def pooled_itl(records: Sequence[Record]) -> Itl | None:
    """All inter-token latencies of all records in ms, none averaged; None when no record has two token chunks."""
    latencies = [1e3 * value for record in records for value in itl(record)]
    if not latencies:
        return None
    worst = 1e3 * max(gap for record in records for gap in chunk_gaps(record))
    return Itl(percentile(latencies, 50), percentile(latencies, 99), worst, len(latencies), _histogram(latencies))


def _histogram(values: Sequence[float]) -> tuple[tuple[float, float, int], ...]:
    """Counts in up to 40 bins; gaps below a hundredth of a ms share the first."""
    clipped = np.maximum(values, 0.01)
    low, high = float(clipped.min()), float(clipped.max())
    edges = np.geomspace(low * 0.98, high * 1.02, HISTOGRAM_BINS + 1)
    counts = np.histogram(clipped, edges)[0]
    return tuple((float(a), float(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True))


def saturation(rows: Sequence[LengthRow]) -> Saturation | None:
    """Smallest length with at least 90 % of the best prefill rate; not reached when that is the longest itself."""
    rates = [(row.prompt_tokens, row.prefill_tok_per_s.median) for row in rows if row.prefill_tok_per_s is not None]
    if len(rates) < 2:
        return None
    best = max(rate for _, rate in rates)
    reached = next(length for length, rate in rates if rate >= SATURATED * best)
    return Saturation(reached if reached != rates[-1][0] else None, best)
