"""Log-probabilities of the chosen token and of the likeliest ones."""

import numpy as np

from biphase.engine.largest import largest
from biphase.engine.rows import Logits
from biphase.scheduling.request import TokenLogprobs


def token_logprobs(row: Logits, token: int, count: int) -> TokenLogprobs:
    """Of the model's own distribution: ``row`` [vocab] before any rule, temperature or filter, as in vLLM."""
    shifted = row - row.max()
    logprobs = shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)
    values, ids = largest(logprobs, min(count, len(row)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
