"""From logits to the next token of each sequence."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from biphase.scheduling.request import SamplingParams

FIRST_CANDIDATES = 256
"""top_p keeps few tokens as a rule: look at this many first. Sorting a whole vocabulary costs milliseconds."""


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """The next token of each row of ``logits`` [N, vocab] (float32); None where the row is not finite.

    ``positions`` are the places of the new tokens in their sequences: with the seed they key the random draw.
    """
    highest, greedy = logits.max(dim=-1)  # NaN wins a maximum, so one pass finds the winner and a broken row
    finite, tokens = torch.isfinite(highest).tolist(), greedy.tolist()
    return [
        None if not finite[row] else tokens[row] if param.temperature == 0 else _draw(logits[row], param, position)
        for row, (param, position) in enumerate(zip(params, positions, strict=True))
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone: the first draw of Philox under that key."""
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _draw(logits: Tensor, params: SamplingParams, position: int) -> int:
    if params.temperature < 1e-5:  # dividing by less overflows float32; the limit is greedy
        return int(logits.argmax())
    scaled = (logits - logits.max()) / params.temperature
    probabilities, ids = _candidates(torch.softmax(scaled, dim=-1), params)
    cumulative = probabilities.double().cumsum(0)
    target = uniform(params.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    index = min(index, len(cumulative) - 1)
    return index if ids is None else int(ids[index])


def _candidates(probabilities: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """The probabilities that top_k and then top_p (of what top_k left) keep, and their ids; None means all."""
    vocab = len(probabilities)
    k = min(params.top_k, vocab) if params.top_k > 0 else vocab
    if params.top_p >= 1:
        if k == vocab:
            return probabilities, None
        values, ids = probabilities.topk(k)
        return values, ids
    size = min(k, FIRST_CANDIDATES)
    while True:
        values, ids = probabilities.topk(size)
        mass = values.sum() if size == k and k < vocab else torch.tensor(1.0)
        before = values.cumsum(0) - values  # a token stays while the mass before it is below top_p
        kept = int((before < params.top_p * mass).sum())
        if kept < size or size == k:
            return values[:kept], ids[:kept]
        size = min(k, size * 8)
