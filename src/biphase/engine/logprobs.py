"""Log-probabilities of the chosen token and of the likeliest ones."""

import torch
from torch import Tensor

from biphase.scheduling.request import TokenLogprobs


def token_logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the model's own distribution: ``row`` [vocab] before any rule, temperature or filter, as in vLLM."""
    logprobs = torch.log_softmax(row.float(), dim=-1)
    values, ids = logprobs.topk(min(count, len(row)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
