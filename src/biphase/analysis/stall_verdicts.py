"""Signs that an attack of ``biphase stall`` did not show what it should: each with what to do about it."""

from collections.abc import Sequence

import numpy as np

from biphase.analysis.stall import Attack, decoding_when_sent, outlasted, quiet_gaps, worst_gap_s
from biphase.analysis.verdicts import (
    FEWEST_GAPS,
    Verdict,
    buffered,
    cache_answered,
    chunks_not_tokens,
    client_lags,
    ended_early,
    foreign_traffic,
    length_differs,
)
from biphase.client.record import Record, RunFacts

NOISY = 2.5
"""p99 of the quiet gaps over their median from which streams stall without a prompt too."""
FEWEST_ATTACKS = 3
REPEATS_DIFFER = 1.5


def stall_verdicts(
    asked_victims: int,
    slots: int | None,
    facts: RunFacts,
    quiet: Sequence[Record],
    attacks: Sequence[Attack],
    alone: Sequence[Record],
) -> list[Verdict]:
    """Everything that spoils the numbers; ``slots``: streams that the server decodes at once, if fewer than asked."""
    sent = [*alone, *quiet, *(r for a in attacks for r in (a.prompt, *a.victims))]
    prompts = [a.prompt for a in attacks]
    found = [
        foreign_traffic(facts.foreign_tokens, sum(r.completion_tokens or 0 for r in sent), facts.busy_before),
        few_slots(asked_victims, slots),
        not_all_decoded(attacks),
        ended_before_the_prompt(attacks),
        noisy_quiet(attacks),
        repeats_differ(attacks),
        too_few(attacks),
    ]
    if prompts:
        found += [cache_answered(prompts, facts.own_tokens), length_differs(prompts)]
    if quiet:
        found += [check(quiet) for check in (ended_early, chunks_not_tokens, buffered, client_lags)]
    return [verdict for verdict in found if verdict is not None]


def few_slots(asked: int, slots: int | None) -> Verdict | None:
    """The server decodes fewer streams at once than were asked for, or one alone: then requests queue."""
    if slots is None:
        return None
    raise_it = "raise its limit (llama.cpp: --parallel; vLLM, biphase serve: --max-num-seqs)"
    if slots == 1:
        return Verdict(
            "one-slot",
            "the server runs one request at a time: streams and prompt wait for each other in its queue, so no "
            "stream can be stalled in decode; the TTFT holds the wait for the streams before it",
            raise_it,
        )
    return Verdict(
        "few-slots",
        f"the server decodes {slots} streams at once: {slots - 1} were used instead of {asked}, so that the prompt "
        "gets a slot of its own",
        f"{raise_it}, or ask for fewer streams (--victims {slots - 1})",
    )


def not_all_decoded(attacks: Sequence[Attack]) -> Verdict | None:
    """Some streams had not begun, or had ended, when the prompt came."""
    missing = [a for a in attacks if decoding_when_sent(a) < len(a.victims)]
    if not missing:
        return None
    fewest = min(decoding_when_sent(a) for a in missing)
    return Verdict(
        "streams-not-decoding",
        f"in {len(missing)} of {len(attacks)} repeats not all streams decoded when the prompt came (in the worst "
        f"{fewest} of {len(missing[0].victims)}): the gaps of the others say nothing of it",
        "ask for fewer streams (--victims), or see what held them up: other load, a rate limit, too little KV cache",
    )


def ended_before_the_prompt(attacks: Sequence[Attack]) -> Verdict | None:
    """Streams ended before the prompt's first token: gaps are missing, or the prompt waited for their place."""
    cut = [a for a in attacks if outlasted(a) < len(a.victims)]
    if not cut:
        return None
    fewest = min(outlasted(a) for a in cut)
    return Verdict(
        "streams-ended",
        f"in {len(cut)} of {len(attacks)} repeats streams ended before the prompt's first token (in the worst {fewest} "
        f"of {len(cut[0].victims)} were left): either the prompt waited for a place, or later gaps are missing",
        "a shorter --prompt, fewer --victims, or more room in the server (its context, its slots, its KV cache)",
    )


def noisy_quiet(attacks: Sequence[Attack]) -> Verdict | None:
    """Streams are held up even when no prompt comes."""
    gaps = [gap.seconds for attack in attacks for gap in quiet_gaps(attack)]
    if len(gaps) < FEWEST_GAPS:
        return None
    median, p99 = float(np.median(gaps)), float(np.percentile(gaps, 99))
    if p99 < NOISY * median:
        return None
    return Verdict(
        "noisy-quiet",
        f"streams stall without a prompt too: quiet p99 {1e3 * p99:.1f} ms, median {1e3 * median:.1f} ms; something "
        "else uses the machine or the server",
        "measure when it is quiet; small chunks cannot be counted in this noise",
    )


def repeats_differ(attacks: Sequence[Attack]) -> Verdict | None:
    """The same prompt did very different harm."""
    worst = [worst_gap_s(a) for a in attacks]
    if len(worst) < 2 or min(worst) <= 0 or max(worst) < REPEATS_DIFFER * min(worst):
        return None
    return Verdict(
        "repeats-differ",
        f"the worst gap lies between {1e3 * min(worst):.0f} and {1e3 * max(worst):.0f} ms in {len(worst)} repeats of "
        "the same prompt: the machine's speed, or other load, changed",
        "measure when it is quiet, with more --repeats",
    )


def too_few(attacks: Sequence[Attack]) -> Verdict | None:
    """Too little for a p99 or for a statement about the next prompt."""
    gaps = sum(len(quiet_gaps(a)) for a in attacks)
    if not attacks or (len(attacks) >= FEWEST_ATTACKS and gaps >= FEWEST_GAPS):
        return None
    return Verdict(
        "too-few-samples",
        f"{len(attacks)} arrivals of the prompt and {gaps} quiet gaps: too few for a worst case ({FEWEST_ATTACKS} "
        f"arrivals) or a quiet p99 ({FEWEST_GAPS} gaps)",
        "raise --repeats or --victims",
    )
