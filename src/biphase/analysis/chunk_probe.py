"""Whether a server prefills in chunks, and of which size: what one stream in decode felt of prompts beside it."""

from collections.abc import Sequence

import msgspec
import numpy as np

from biphase.analysis.chunk_size import Chunking, Counted, count_passes, recover
from biphase.analysis.stall import Attack, stream_gaps, worst_gap_s
from biphase.client.record import Record

PROBE = "chunk-probe"
_WATCHER = "-watcher"
FEWEST_QUIET = 3


class ChunkedPrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stream in decode felt of the longest prompt beside it, and the chunk that all probes together allow.

    ``chunk_tokens`` is the likeliest size between ``chunk_tokens_least`` and ``chunk_tokens_most``; an engine whose
    budget covers decodes too has one token more. Both are None when the prompt ran whole: the chunk, if there is any,
    is no smaller than the prompt. ``single_size`` is False where no one size explains the counts.
    """

    prompt_tokens: int
    raised_gaps: int
    worst_gap_ms: float
    usual_gap_ms: float
    chunk_tokens: int | None
    chunk_tokens_least: int
    chunk_tokens_most: int | None
    single_size: bool


def not_probes(records: Sequence[Record]) -> list[Record]:
    """Records of everything but the probes."""
    return [r for r in records if not r.id.startswith(PROBE)]


def probe_ids(number: int) -> tuple[str, str]:
    """Ids of a prompt and of the stream that watches it."""
    return f"{PROBE}-{number}", f"{PROBE}-{number}{_WATCHER}"


def probes(records: Sequence[Record]) -> list[Attack]:
    """Prompts with the stream that decoded beside each, where that stream was in decode from before to after."""
    watchers = {r.id.removesuffix(_WATCHER): r for r in records if r.id.endswith(_WATCHER) and r.token_chunks}
    pairs = [Attack(r, (watchers[r.id],)) for r in records if r.id in watchers and r.token_chunks]
    return [a for a in pairs if a.victims[0].token_chunks[-1].t >= a.first_token and _watched_before(a)]


def _watched_before(attack: Attack) -> bool:
    began = attack.victims[0].token_chunks[0].t < attack.sent
    return began and len(_quiet_gaps(attack)) >= FEWEST_QUIET


def _quiet_gaps(attack: Attack) -> list[float]:
    """Gaps of the watching stream while it decoded alone, before the prompt came or after its answer had ended."""
    end = attack.prompt.token_chunks[-1].t
    return [g.seconds for g in stream_gaps(attack.victims[0]) if g.end <= attack.sent or g.start >= end]


def _quiet_s(attacks: Sequence[Attack]) -> float | None:
    gaps = [seconds for attack in attacks for seconds in _quiet_gaps(attack)]
    return float(np.median(gaps)) if gaps else None


def chunking(records: Sequence[Record]) -> Chunking | None:
    """The size that explains all probes; None when none felt anything."""
    found = probes(records)
    quiet = _quiet_s(found)
    if quiet is None:
        return None
    return recover([Counted(a.prompt_tokens, count_passes(a, quiet)) for a in found])


def chunked_prefill(records: Sequence[Record]) -> ChunkedPrefill | None:
    """The result of all probes; None without one, or where the prompts held no stream up."""
    found, explained = probes(records), chunking(records)
    quiet = _quiet_s(found)
    if explained is None or quiet is None:
        return None
    longest = max(found, key=lambda a: a.prompt_tokens)
    return ChunkedPrefill(
        prompt_tokens=longest.prompt_tokens,
        raised_gaps=count_passes(longest, quiet),
        worst_gap_ms=1e3 * worst_gap_s(longest),
        usual_gap_ms=1e3 * quiet,
        chunk_tokens=explained.chunk_tokens,
        chunk_tokens_least=explained.least if explained.least is not None else longest.prompt_tokens,
        chunk_tokens_most=explained.most,
        single_size=explained.single_size,
    )
