"""Penalties, biases and bans: what changes one row of logits before its token is chosen.

In vLLM's order: grammar, bias, min_tokens, then repetition, frequency and presence penalty. All read the token ids of
the request, not what this step computed, so cached and resumed tokens count (llama.cpp #8971).
"""

from collections.abc import Sequence

import numpy as np

from biphase.engine.grammar import GrammarError, Grammars
from biphase.engine.rows import Logits
from biphase.scheduling.request import LogitRules, Request

BANNED = float("-inf")


def apply_rules(row: Logits, request: Request, rules: LogitRules, grammars: Grammars | None) -> None:
    """Change ``row`` [vocab] in place; ``GrammarError`` when the grammar leaves nothing to choose."""
    if rules.grammar is not None:
        _keep_to_grammar(row, request, rules.grammar, grammars)
    if rules.logit_bias:
        ids, biases = zip(*rules.logit_bias, strict=True)
        row[list(ids)] += np.array(biases, dtype=np.float32)
    if len(request.output) < rules.min_tokens:
        row[list(request.stop_ids)] = BANNED
    if rules.repetition_penalty != 1:
        _penalize_repetition(row, [*request.prompt, *request.output], rules.repetition_penalty)
    if request.output and (rules.frequency_penalty or rules.presence_penalty):
        _penalize_output(row, request.output, rules)


def _keep_to_grammar(row: Logits, request: Request, grammar: str, grammars: Grammars | None) -> None:
    if grammars is None:
        raise GrammarError("the engine was given no vocabulary, which a response_format needs")
    row[~grammars.allowed(request, grammar)] = BANNED
    if not np.isfinite(row.max()):
        raise GrammarError("the response_format leaves no token to choose")


def _penalize_repetition(row: Logits, tokens: Sequence[int], penalty: float) -> None:
    """Keskar et al. 2019 (CTRL), section 4.1: divide what is above zero, multiply what is below, each token once."""
    seen = np.unique(np.array(tokens, dtype=np.int64))
    values = row[seen]
    row[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def _penalize_output(row: Logits, output: Sequence[int], rules: LogitRules) -> None:
    """OpenAI's formula: a token that came c times loses c times the frequency and once the presence penalty."""
    seen, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
    row[seen] -= (counts * rules.frequency_penalty + rules.presence_penalty).astype(np.float32)
