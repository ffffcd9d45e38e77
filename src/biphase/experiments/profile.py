"""Profile: how long prefill and decode take on one server, by prompt length, one request at a time."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

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
from biphase.analysis.verdicts import warnings
from biphase.client.endpoint import Access
from biphase.client.load import closed_loop, patient
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Call, make_call
from biphase.client.record import Keep, Record
from biphase.errors import RunFailed

INTERRUPTED = "interrupted"
WARMUP_TOKENS = 4
SATURATED = 0.9
"""Prefill is saturated at the smallest length whose rate is at least this part of the best one."""


@dataclass(frozen=True)
class ProfilePlan:
    """Prompt lengths in tokens, tokens to generate, requests for each length."""

    lengths: tuple[int, ...]
    tokens: int
    repeats: int


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A length that was not measured."""

    prompt_tokens: int
    reason: str


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
    """Inter-token latencies of all requests pooled; ``worst_gap`` is the longest wait between two chunks."""

    median: float
    p99: float
    worst_gap: float
    n: int


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where prefill throughput stops rising: ``prompt_tokens`` is None when the longest length still gains markedly."""

    prompt_tokens: int | None
    best_tok_per_s: float


class ProfileResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A profile; the JSON of ``biphase profile --json`` is this type, with units in the names of the keys."""

    biphase: str
    url: str
    model: str
    tokens: int
    repeats: int
    rows: tuple[LengthRow, ...]
    left_out: tuple[LeftOut, ...]
    itl_ms: Itl | None
    prefill_saturation: Saturation | None
    http_round_trip_ms: Spread | None
    http_round_trip_path: str
    client_lag_ms: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    error: str | None = None


Progress = Callable[[int, int, str], None]
"""Told before each request: how many are done, of how many, and what is being measured."""


async def measure(
    url: str, model: str | None, access: Access, plan: ProfilePlan, keep: Keep, progress: Progress, version: str
) -> ProfileResult:
    """Profile the server at ``url``; every record goes to ``keep`` as it ends.

    Raises ``RunFailed`` or ``BadInput`` when the server cannot be measured at all. A run that breaks off later, or is
    interrupted, gives what was measured until then, with ``error`` set.
    """
    async with open_target(url, model, access) as target:
        run = Profile(target, plan, keep, progress)
        try:
            await run.run()
        except RunFailed as failure:
            return run.result(version, error=str(failure))
        except asyncio.CancelledError:
            return run.result(version, error=INTERRUPTED)
        return run.result(version)


class Profile:
    """One run in progress. ``records`` and ``left_out`` hold what there is at any time, also after a failure."""

    def __init__(self, target: Target, plan: ProfilePlan, keep: Keep, progress: Progress) -> None:
        self.target = target
        self.plan = plan
        self.records: list[Record] = []
        self.left_out: list[LeftOut] = []
        self._keep = keep
        self._progress = progress
        self._done = 0

    async def run(self) -> None:
        """Warm up at each length, then measure; raises ``RunFailed`` at the first request that fails."""
        lengths = [length for length in sorted(set(self.plan.lengths)) if self._fits(length)]
        lengths = await self._warm_up(lengths)
        if not lengths:
            last = self.left_out[-1]
            raise RunFailed(f"no prompt length can be measured; {last.prompt_tokens} tokens: {last.reason}")
        async for _ in closed_loop(self._calls(lengths), self._measured):
            pass

    def _fits(self, length: int) -> bool:
        shortest, limit = self.target.prompts.shortest, self.target.api.max_model_len
        reason = None
        if length < shortest:
            reason = f"shorter than the {shortest - 1} tokens that the server itself puts into each prompt and one more"
        if limit is not None and length + self.plan.tokens > limit:
            reason = f"with {self.plan.tokens} tokens of answer it exceeds the server's limit of {limit} tokens"
        if reason is not None:
            self.left_out.append(LeftOut(length, reason))
        return reason is None

    async def _warm_up(self, lengths: Sequence[int]) -> list[int]:
        """Lengths that the server takes, each run once: what compiles or allocates on first use does so here."""
        taken = []
        for length in lengths:
            self._step(len(lengths), f"warm-up, prompt of {length} tokens")
            tokens = min(WARMUP_TOKENS, self.plan.tokens)
            record = await self._send(self._call(f"warm-up-{length}", length, tokens, warmup=True))
            if record.error is None:
                taken.append(length)
            elif record.status in (400, 413, 422):
                self.left_out.append(LeftOut(length, f"the server refuses it: {record.error}"))
            else:
                raise RunFailed(f"the warm-up with {length} prompt tokens failed: {record.error}")
        return taken

    def _step(self, lengths: int, what: str) -> None:
        self._progress(self._done, lengths * (self.plan.repeats + 1), what)
        self._done += 1

    def _calls(self, lengths: Sequence[int]) -> Iterator[Call]:
        """All (length, repeat) pairs in random order: drift of the machine must not look like a law of length."""
        pairs = [(length, repeat) for length in lengths for repeat in range(1, self.plan.repeats + 1)]
        random.shuffle(pairs)
        for length, repeat in pairs:
            self._step(len(lengths), f"prompt of {length} tokens")
            yield self._call(f"prompt-{length}-{repeat}", length, self.plan.tokens)

    def _call(self, id: str, length: int, tokens: int, warmup: bool = False) -> Call:
        prompt = self.target.prompts.make(length)
        return make_call(self.target.dialect, id, prompt.content, length, tokens, warmup)

    async def _send(self, call: Call) -> Record:
        record = (await patient(self.target.session, call)).record
        self._keep(record)
        return record

    async def _measured(self, call: Call) -> Record:
        record = await self._send(call)
        if record.error is not None:
            raise RunFailed(f"request {record.id} failed after {len(self.records)} good ones: {record.error}")
        self.records.append(record)
        return record

    def result(self, version: str, error: str | None = None) -> ProfileResult:
        """What the records so far say."""
        target, records = self.target, self.records
        rows = tuple(
            _row(length, [r for r in records if r.asked_prompt_tokens == length]) for length in _lengths(records)
        )
        return ProfileResult(
            biphase=version,
            url=target.api.base,
            model=target.api.model,
            tokens=self.plan.tokens,
            repeats=self.plan.repeats,
            rows=rows,
            left_out=tuple(self.left_out),
            itl_ms=pooled_itl(records),
            prefill_saturation=saturation(rows),
            http_round_trip_ms=spread(target.round_trip_s, 1e3),
            http_round_trip_path=target.round_trip_path,
            client_lag_ms=1e3 * max((r.client_lag for r in records), default=0.0),
            notes=target.notes,
            warnings=tuple(warnings(records, target.prompts.shortest - 1)),
            error=error,
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
    return Itl(percentile(latencies, 50), percentile(latencies, 99), worst, len(latencies))


def saturation(rows: Sequence[LengthRow]) -> Saturation | None:
    """Smallest length with at least 90 % of the best prefill rate; not reached when that is the longest itself."""
    rates = [(row.prompt_tokens, row.prefill_tok_per_s.median) for row in rows if row.prefill_tok_per_s is not None]
    if len(rates) < 2:
        return None
    best = max(rate for _, rate in rates)
    reached = next(length for length, rate in rates if rate >= SATURATED * best)
    return Saturation(reached if reached != rates[-1][0] else None, best)
