"""What a split means: which phase to optimise and with what, as findings with the numbers that they rest on.

Prefill is bound by compute, decode by memory traffic (the roofline of ``biphase roofline``); so the remedies differ,
and which of them count depends on where the engine's time goes, not on where users wait.
"""

from collections.abc import Callable, Sequence

from biphase.analysis.phase_split import Split
from biphase.analysis.split_window import Reading
from biphase.analysis.verdicts import Verdict

MOSTLY = 0.6
"""Share of engine-seconds from which a phase is what the machine does."""
QUEUED = 0.1
FULL = 0.95
SMALL_BATCH = 16.0
"""Sequences a step below which the read of the weights outweighs the work per sequence on any current accelerator."""
IDLE = 0.3
SLOWED = 1.3
"""Time between tokens over that of a decode step from which streams wait for prompts."""
UNSHARED, SHARED = 0.02, 0.1


def meaning(found: Split) -> tuple[Verdict, ...]:
    """What follows from a split, the weightiest first; nothing where nothing happened."""
    rules: Sequence[Callable[[Split], Verdict | None]] = (
        _idle,
        _queued,
        _full,
        _preempted,
        _phase,
        _slowed,
        _cache,
    )
    return tuple(said for rule in rules if (said := rule(found)) is not None)


def percent(share: float) -> str:
    """A share as a percentage; never 0 or 100 where it is not."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    shown = f"{100 * share:.0f}"
    return f"{100 * share:.1f} %" if shown in ("0", "100") and share not in (0, 1) else f"{shown} %"


def _idle(found: Split) -> Verdict | None:
    if found.engine_busy is None or not 0 < found.engine_busy < IDLE:
        return None
    return Verdict(
        "idle",
        f"the engine worked {percent(found.engine_busy)} of the window",
        "there is room: fewer machines would do; what follows shapes latency, not capacity",
    )


def _queued(found: Split) -> Verdict | None:
    parts = (found.queue_s, found.request_s.prefill, found.request_s.decode)
    known = [part.value for part in parts if part is not None]
    if len(known) < len(parts) or sum(known) <= 0 or known[0] / sum(known) < QUEUED:
        return None
    full = found.kv_usage is not None and found.kv_usage.most >= FULL
    return Verdict(
        "queued",
        f"requests spent {percent(known[0] / sum(known))} of their time in the queue",
        "the KV cache is full, so memory comes first: quantise it or shorten contexts; else more replicas"
        if full
        else "raise the limit of the batch (vLLM: --max-num-seqs) as far as the ITL wanted allows; else more replicas",
    )


def _full(found: Split) -> Verdict | None:
    usage = found.kv_usage
    if usage is None or not FULL <= usage.most <= 1:
        return None
    return Verdict(
        "kv-full",
        f"the KV cache was {percent(usage.most)} full at most ({percent(usage.mean)} on average)",
        "it limits the batch: quantise it (FP8, INT8), give it more memory, or share the model over more devices",
    )


def _preempted(found: Split) -> Verdict | None:
    if found.preemptions is None or found.preemptions.value <= 0:
        return None
    return Verdict(
        "preempted",
        f"{found.preemptions.value:,.0f} requests were preempted; their prompts are computed again",
        "the KV cache is too small for the batch: a lower limit of the batch, or more KV memory",
    )


def _phase(found: Split) -> Verdict | None:
    share = found.engine_s.prefill_share
    if share is None:
        return _unknown(found)
    if share >= MOSTLY:
        return _prefill_bound(found, share)
    return _decode_bound(found, share) if share <= 1 - MOSTLY else _both(found, share)


def _unknown(found: Split) -> Verdict | None:
    waits = found.request_s.prefill_share
    if waits is None:
        return None
    phase, part = ("prefill", waits) if waits > 0.5 else ("decode", 1 - waits)
    return Verdict(
        "users-wait",
        f"of the time in both phases users wait {percent(part)} in {phase}; where the machine works is another "
        "question, as requests overlap",
        found.engine_s_advice,
    )


def _prefill_bound(found: Split, share: float) -> Verdict:
    cache = _hits(found)
    return Verdict(
        "prefill-bound",
        f"the machine spends {percent(share)} of its work on prefill, which is bound by arithmetic",
        f"prefix caching where prompts share a start ({cache}); arithmetic in FP8 or INT8 (weights alone in fewer "
        "bits do not help here); shorter prompts; devices with more FLOP/s",
    )


def _hits(found: Split) -> str:
    return "its hits are not told" if found.cache_hit_rate is None else f"hit rate now {percent(found.cache_hit_rate)}"


def _decode_bound(found: Split, share: float) -> Verdict:
    batch = found.decode_batch
    head = f"the machine spends {percent(1 - share)} of its work on decode, which is bound by memory traffic"
    if batch is not None and batch.value < SMALL_BATCH:
        return Verdict(
            "decode-bound",
            f"{head}; {batch.value:.1f} sequences share each read of the weights",
            "larger batches (fewer replicas, or a higher limit); weights in 8 or 4 bits; speculative decoding",
        )
    size = f"; the batch is {batch.value:.0f}" if batch is not None else ""
    return Verdict(
        "decode-bound",
        f"{head}{size}",
        "a KV cache in 8 bits, as its reads grow with batch and context; weights in fewer bits; more bandwidth",
    )


def _both(found: Split, share: float) -> Verdict:
    return Verdict(
        "both-phases",
        f"the machine's work is prefill for {percent(share)} and decode for {percent(1 - share)}: neither dominates",
        "chunked prefill with a budget for the ITL; with many replicas, pools of their own (disaggregation) of "
        f"{share / (1 - share):.2g} prefill devices for each decode device, if the link carries the KV cache in time",
    )


def _slowed(found: Split) -> Verdict | None:
    """Streams against their own steps: counted engine-seconds and steps are needed for both."""
    decode, steps, requests = found.engine_s.decode, found.decode_steps, found.request_s.decode
    tokens = found.tokens.decode
    parts = (decode, steps, requests, tokens)
    if found.engine_s.origin != "counted" or any(part is None or part.value <= 0 for part in parts):
        return None
    step_s, token_s = _ratio(decode, steps), _ratio(requests, tokens)
    if token_s < SLOWED * step_s:
        return None
    return Verdict(
        "streams-wait",
        f"a stream gets a token every {1e3 * token_s:.3g} ms where a decode step alone takes {1e3 * step_s:.3g} ms: "
        "prompts run in between",
        "smaller chunks or a budget for the ITL (vLLM: --max-num-batched-tokens); or prefill on other devices",
    )


def _ratio(part: Reading | None, whole: Reading | None) -> float:
    return part.value / whole.value if part is not None and whole is not None else 0.0


def _cache(found: Split) -> Verdict | None:
    rate, prefill, price = found.cache_hit_rate, found.engine_s.prefill_share, found.price
    if rate is None or found.cached_tokens is None:
        return None
    if rate >= SHARED:
        cached = found.cached_tokens.value
        worth = f", worth up to {cached * price.computed_input_s:,.1f} engine-seconds" if price is not None else ""
        return Verdict(
            "cache-works",
            f"the prefix cache gave {percent(rate)} of the prompt tokens ({cached:,.0f}{worth})",
            "keep what prompts share in their first tokens, and requests of a conversation on one replica",
        )
    if rate < UNSHARED and prefill is not None and prefill > 1 - MOSTLY:
        return Verdict(
            "cache-idle",
            f"the prefix cache gave {percent(rate)} of the prompt tokens",
            "if prompts share a start (system prompt, conversation), put it first, unchanged, and switch caching on",
        )
    return None
