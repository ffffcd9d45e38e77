"""From logits to the next token of each sequence."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from biphase.engine.grammar import GrammarError, Grammars
from biphase.engine.largest import largest
from biphase.engine.logit_rules import apply_rules
from biphase.engine.logprobs import token_logprobs
from biphase.engine.rows import Ids, Logits
from biphase.scheduling.request import Request, SamplingParams, TokenLogprobs

NOT_FINITE = "the model's logits are not finite (NaN or infinite)"

FIRST_CANDIDATES = 256
"""top_p keeps few tokens as a rule: look at this many first. Sorting a whole vocabulary costs milliseconds."""


class Choice(NamedTuple):
    """The next token of one request, or why it has none."""

    token: int | None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


def choose(logits: Logits, requests: Sequence[Request], grammars: Grammars | None = None) -> list[Choice]:
    """The next token of each request from its row of ``logits`` [N, vocab] (float32).

    A row that is not finite, or a grammar that cannot go on, fails its own request alone.
    """
    ruled = [row for row, request in enumerate(requests) if request.sampling.rules is not None]
    changed, errors = _changed(logits, ruled, requests, grammars) if ruled else (logits, {})
    tokens = sample(changed, [r.sampling for r in requests], [r.num_tokens for r in requests])
    return [
        Choice(None, errors.get(row, NOT_FINITE))
        if token is None or row in errors
        else Choice(token, None, _logprobs(logits[row], token, request.sampling))
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]


def _changed(
    logits: Logits, rows: Sequence[int], requests: Sequence[Request], grammars: Grammars | None
) -> tuple[Logits, dict[int, str]]:
    """A copy of ``logits`` with the rules of ``rows`` applied, and the rows whose grammar cannot go on.

    Rows that are not finite stay as they are: a ban must not hide them.
    """
    changed, errors = logits.copy(), {}
    for row in rows:
        rules = requests[row].sampling.rules
        if rules is None or not np.isfinite(logits[row].max()):
            continue
        try:
            apply_rules(changed[row], requests[row], rules, grammars)
        except GrammarError as error:
            errors[row] = str(error)
    return changed, errors


def _logprobs(row: Logits, token: int, params: SamplingParams) -> TokenLogprobs | None:
    return None if params.logprobs is None else token_logprobs(row, token, params.logprobs)


def sample(logits: Logits, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """The next token of each row of ``logits`` [N, vocab] (float32); None where the row is not finite.

    ``positions`` are the places of the new tokens in their sequences: with the seed they key the random draw.
    """
    greedy = logits.argmax(-1)  # NaN wins a maximum, so one pass finds the winner and a broken row
    finite, tokens = np.isfinite(logits[np.arange(len(logits)), greedy]).tolist(), greedy.tolist()
    return [
        None if not finite[row] else tokens[row] if param.temperature == 0 else _draw(logits[row], param, position)
        for row, (param, position) in enumerate(zip(params, positions, strict=True))
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone: the first draw of Philox under that key."""
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _draw(logits: Logits, params: SamplingParams, position: int) -> int:
    if params.temperature < 1e-5:  # dividing by less overflows float32; the limit is greedy
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    probabilities, ids = _candidates(_likely(weights / weights.sum(), params.min_p), params)
    cumulative = probabilities.cumsum(dtype=np.float64)
    target = uniform(params.seed, position) * cumulative[-1]
    index = min(int(np.searchsorted(cumulative, target, side="right")), len(cumulative) - 1)
    return index if ids is None else int(ids[index])


def _likely(probabilities: Logits, min_p: float) -> Logits:
    """Those of at least ``min_p`` times the highest probability, made to sum to 1 again (Nguyen et al. 2024)."""
    if min_p == 0:
        return probabilities
    kept = np.where(probabilities >= np.float32(min_p) * probabilities.max(), probabilities, np.float32(0))
    likely: Logits = kept / kept.sum()
    return likely


def _candidates(probabilities: Logits, params: SamplingParams) -> tuple[Logits, Ids | None]:
    """The probabilities that top_k and then top_p (of what top_k left) keep, and their ids; None means all.

    In the order of ids, not of likelihood: two nearly equal ones that trade places would trade a draw's token too.
    """
    vocab = len(probabilities)
    k = min(params.top_k, vocab) if params.top_k > 0 else vocab
    if params.top_p >= 1:
        return (probabilities, None) if k == vocab else largest(probabilities, k)
    size = min(k, FIRST_CANDIDATES)
    while True:
        values, ids = largest(probabilities, size)
        mass = values.sum() if size == k and k < vocab else np.float32(1)
        before = values.cumsum() - values  # a token stays while the mass before it is below top_p
        kept = int(np.count_nonzero(before < np.float32(params.top_p) * mass))
        if kept < size or size == k:
            order = np.argsort(ids[:kept])
            return values[order], ids[order]
        size = min(k, size * 8)
