"""Signs that a measurement is not what it looks like: each has a name, a sentence, and what to do about it."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from scipy import stats

from biphase.analysis.latency import chunk_gaps, e2e, itl, spread, tpot, ttft
from biphase.client.record import Record

UNSTEADY = 0.25
"""Half the interquartile range of the TTFT at one length, as part of its median, from which a profile is no profile."""
LAG_SHARE = 0.1
"""Lag of the client, as part of the ITL, from which it is not the server alone that is measured."""
FEWEST_REQUESTS = 5
FEWEST_GAPS = 100
IMPOSSIBLE = 0.4
"""Part of the median TTFT of its length below which a long prompt cannot have been computed."""
LONG_PROMPT = 128
ROLE_LEAD = 5.0
"""ITLs by which a role chunk must precede the first token to be told from it."""
BURSTS = 0.5
DRIFT = 0.1
DRIFT_CERTAINTY = 0.01
FEWEST_FOR_DRIFT = 12


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name`` is stable and for scripts; ``sentence`` says what was seen; ``advice`` what to do."""

    name: str
    sentence: str
    advice: str


Check = Callable[[Sequence[Record]], Verdict | None]


def verdicts(records: Sequence[Record], own_tokens: int = 0) -> list[Verdict]:
    """Everything that spoils the numbers; ``own_tokens``: prompt tokens the server adds, always cached."""
    if not records:
        return []
    checks: tuple[Check, ...] = (
        lambda found: cache_answered(found, own_tokens),
        impossibly_fast,
        ended_early,
        chunks_not_tokens,
        length_differs,
        buffered,
        role_chunk_leads,
        client_lags,
        drifts,
        unsteady,
        too_few,
    )
    return [verdict for check in checks if (verdict := check(records)) is not None]


def cache_answered(records: Sequence[Record], own_tokens: int = 0) -> Verdict | None:
    """Prompt tokens came from a prefix cache; one beyond the server's own is chance (the same first token)."""
    cached = [r for r in records if (r.cached_tokens or 0) > own_tokens + 1]
    if not cached:
        return None
    worst = max(cached, key=lambda r: r.cached_tokens or 0)
    return Verdict(
        "prefix-cache",
        f"the server's prefix cache answered in {len(cached)} of {len(records)} requests (up to {worst.cached_tokens} "
        f"of {worst.prompt_tokens} prompt tokens): prefill is measured on the rest alone",
        "restart the server without prefix caching (vLLM: --no-enable-prefix-caching), or see what sends these prompts",
    )


def impossibly_fast(records: Sequence[Record]) -> Verdict | None:
    """Some prompts of a length took a small part of the others' time: they were not computed."""
    fast = []
    for length, times in _ttft_by_length(records).items():
        if length is not None and length >= LONG_PROMPT and len(times) > 2:
            fast += [(length, t) for t in times if t < IMPOSSIBLE * float(np.median(times))]
    if not fast:
        return None
    length, quickest = min(fast, key=lambda pair: pair[1])
    return Verdict(
        "impossible-prefill",
        f"{len(fast)} of {len(records)} prompts came back in less than {100 * IMPOSSIBLE:.0f} % of their length's "
        f"median (a prompt of {length} in {1e3 * quickest:.1f} ms): a cache answered, counted by the server or not",
        "switch prefix and response caches off, also those of a gateway before the server",
    )


def ended_early(records: Sequence[Record]) -> Verdict | None:
    """Fewer tokens than asked for: the model ended its answer (EOS) and the server let it."""
    short = [r for r in records if (r.completion_tokens or 0) < (r.asked_completion_tokens or 0)]
    if not short:
        return None
    fewest, asked = min(r.completion_tokens or 0 for r in short), short[0].asked_completion_tokens
    return Verdict(
        "early-eos",
        f"{len(short)} of {len(records)} answers ended early, the shortest after {fewest} of {asked} tokens: "
        "decode numbers rest on fewer tokens (the server does not honour ignore_eos)",
        "ask for fewer tokens (--tokens), or repeat more (--repeats)",
    )


def chunks_not_tokens(records: Sequence[Record]) -> Verdict | None:
    """Chunks and tokens differ in number: a gap between chunks is not the time of one token."""
    uneven = [r for r in records if r.completion_tokens and len(r.token_chunks) != r.completion_tokens]
    if uneven:
        tokens, chunks = sum(r.completion_tokens or 0 for r in uneven), sum(len(r.token_chunks) for r in uneven)
        counted = all(r.completion_tokens_source == "continuous_usage" for r in uneven)
        how = "counted by the server chunk by chunk" if counted else "spread over the chunks by length of text"
        return Verdict(
            "chunk-is-not-token",
            f"chunks are not tokens: {tokens / chunks:.2f} tokens a chunk in {len(uneven)} of {len(records)} answers; "
            f"gaps are divided by the tokens of the chunk, {how}",
            "expected with speculative decoding or a stream interval; compare decode ms/token, not gaps",
        )
    if any(r.completion_tokens_source == "chunks" for r in records):
        return Verdict(
            "tokens-not-counted",
            "the server reports no token counts: one token a chunk is assumed",
            "check that it supports stream_options.include_usage, or a gateway removes it",
        )
    return None


def length_differs(records: Sequence[Record]) -> Verdict | None:
    """The server counted other prompt lengths than were asked for."""
    off = [r for r in records if r.prompt_tokens is not None and r.prompt_tokens != r.asked_prompt_tokens]
    if not off:
        return None
    worst = max(off, key=lambda r: abs((r.prompt_tokens or 0) - (r.asked_prompt_tokens or 0)))
    truncated = (worst.prompt_tokens or 0) < 0.9 * (worst.asked_prompt_tokens or 0)
    return Verdict(
        "prompt-length",
        f"{len(off)} of {len(records)} prompts were not of the length asked for "
        f"({worst.prompt_tokens} tokens counted for {worst.asked_prompt_tokens}): rates use the server's count"
        + ("; it seems to cut long prompts" if truncated else ""),
        "raise the server's context limit or leave the long prompts out (--lengths)"
        if truncated
        else "nothing: laws and rates use the counted length",
    )


def buffered(records: Sequence[Record]) -> Verdict | None:
    """Tokens come in bursts: most gaps are nothing beside the mean one."""
    gaps = [gap for r in records for gap in chunk_gaps(r)]
    whole = sum(e2e(r) or 0.0 for r in records)
    if len(gaps) < 8 or whole == 0:
        return None
    tiny = float(np.mean(np.array(gaps) < 0.1 * np.mean(gaps)))
    at_once = sum(gaps) < 0.01 * whole
    if tiny < BURSTS and not at_once:
        return None
    seen = "whole answers arrive at once" if at_once else f"{100 * tiny:.0f} % of the chunks arrive with the one before"
    return Verdict(
        "buffered-stream",
        f"{seen}: something between server and client holds the stream back, so gaps and TTFT are not the server's",
        "measure without the proxy, or switch its buffering off (nginx: proxy_buffering off)",
    )


def role_chunk_leads(records: Sequence[Record]) -> Verdict | None:
    """A role chunk long before the first token: clients that take it for the first token report another TTFT."""
    leads = [
        (r.token_chunks[0].t - role.t, r)
        for r in records
        if r.token_chunks and (role := next((c for c in r.chunks if c.kind == "role"), None)) is not None
    ]
    pace = spread(value for r in records for value in itl(r))
    if not leads or pace is None:
        return None
    lead = float(np.median([seconds for seconds, _ in leads]))
    if lead < ROLE_LEAD * pace.median:
        return None
    true = float(np.median([ttft(r) or 0.0 for _, r in leads]))
    return Verdict(
        "role-chunk",
        f"the role chunk comes {1e3 * lead:.1f} ms before the first token (medians): a client that takes it for the "
        f"first token reports a TTFT of {1e3 * (true - lead):.1f} ms instead of {1e3 * true:.1f} ms",
        "nothing here: TTFT is the first chunk with text; check what the tools you compare with count",
    )


def client_lags(records: Sequence[Record]) -> Verdict | None:
    """The client itself came late to the bytes, by a part of the ITL that shows."""
    pace, lag = spread(map(tpot, records)), spread(r.client_lag for r in records)
    if pace is None or lag is None or not pace.median or lag.median < LAG_SHARE * pace.median:
        return None
    return Verdict(
        "client-lag",
        f"bytes waited for this client up to {1e3 * lag.median:.2f} ms (median of the requests' worst), "
        f"{100 * lag.median / pace.median:.0f} % of the ITL: short gaps are partly the client's",
        "run the client on another machine or on a core of its own, with fewer streams at a time",
    )


def drifts(records: Sequence[Record]) -> Verdict | None:
    """The last third of the run differs from the first in a way that chance does not explain."""
    for name, of in (("prefill", ttft), ("decode", tpot)):
        pairs = _relative_in_order(records, of)
        third = len(pairs) // 3
        if len(pairs) < FEWEST_FOR_DRIFT:
            continue
        first, last = pairs[:third], pairs[-third:]
        change = float(np.median(last) / np.median(first)) - 1
        if abs(change) > DRIFT and stats.mannwhitneyu(first, last).pvalue < DRIFT_CERTAINTY:
            return Verdict(
                "drift",
                f"{name} became {abs(100 * change):.0f} % {'slower' if change > 0 else 'faster'} between the first and "
                "the last third of the run: clocks, heat or other load changed; medians mix both",
                "warm the machine up, or fix its clocks, and measure again",
            )
    return None


def _relative_in_order(records: Sequence[Record], of: Callable[[Record], float | None]) -> list[float]:
    """Values in the order of sending, each over the median of its prompt length."""
    by_length: dict[int | None, list[float]] = defaultdict(list)
    for record in records:
        if value := of(record):
            by_length[record.asked_prompt_tokens].append(value)
    medians = {length: float(np.median(values)) for length, values in by_length.items()}
    ordered = sorted(records, key=lambda r: r.sent)
    return [value / medians[r.asked_prompt_tokens] for r in ordered if (value := of(r))]


def unsteady(records: Sequence[Record]) -> Verdict | None:
    """Requests of the same length take very different times: something else runs on the machine or on the server."""
    spreads = ((spread(times), length) for length, times in _ttft_by_length(records).items())
    known = [(found.relative, length) for found, length in spreads if found is not None and found.n > 2]
    widest, length = max(known, key=lambda pair: pair[0], default=(0.0, None))
    if widest < UNSTEADY:
        return None
    return Verdict(
        "unsteady",
        f"prefill of the same length varies by {100 * widest:.0f} % (half the interquartile range, prompt of "
        f"{length}): the machine or the server was busy with something else",
        "measure again when it is quiet",
    )


def _ttft_by_length(records: Sequence[Record]) -> dict[int | None, list[float]]:
    by_length: dict[int | None, list[float]] = defaultdict(list)
    for record in records:
        if (seconds := ttft(record)) is not None:
            by_length[record.asked_prompt_tokens].append(seconds)
    return by_length


def too_few(records: Sequence[Record]) -> Verdict | None:
    """Fewer requests than a median with a spread needs."""
    fewest = min((len(times) for times in _ttft_by_length(records).values()), default=0)
    gaps = sum(len(itl(r)) for r in records)
    if fewest >= FEWEST_REQUESTS and gaps >= FEWEST_GAPS:
        return None
    return Verdict(
        "too-few-samples",
        f"{fewest} requests at one length and {gaps} inter-token latencies in all: too few for medians with a spread "
        f"({FEWEST_REQUESTS} requests) or for a p99 ({FEWEST_GAPS} latencies)",
        "raise --repeats or --tokens",
    )


def foreign_traffic(foreign_tokens: int | None, own: int, busy_before: int | None) -> Verdict | None:
    """The server generated tokens for others meanwhile; None where it has no counters to tell."""
    if busy_before:
        seen = f"{busy_before} requests were running on the server before this measurement sent one"
    elif foreign_tokens is not None and foreign_tokens > 0.01 * own:
        seen = f"the server generated {foreign_tokens} tokens for others while it generated {own} for this measurement"
    else:
        return None
    return Verdict(
        "foreign-traffic", f"{seen}: times hold their share of the machine", "measure when nobody else uses the server"
    )


def faster_than_floor(beaten: Sequence[str]) -> Verdict | None:
    """A phase beat what the named hardware permits; ``beaten`` says which, in sentences."""
    if not beaten:
        return None
    return Verdict(
        "faster-than-floor",
        "; ".join(beaten),
        "correct --model-config, --gpu or --tp; the floors shown are not the server's",
    )
