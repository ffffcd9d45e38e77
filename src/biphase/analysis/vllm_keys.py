"""The keys of ``vllm bench serve --save-result``, by its definitions, so that scripts made for it read a profile.

TPOT is ``(E2E - TTFT) / (output tokens - 1)``; ITL are the raw gaps between chunks; all requests sent one at a time
count, whatever their prompt length. Times in ms, ``duration`` in seconds, standard deviations are numpy's (ddof 0).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from biphase.analysis.latency import chunk_gaps, e2e, ttft
from biphase.client.record import Record

Value = float | int | str


def vllm_keys(records: Sequence[Record], model: str, started: str) -> Mapping[str, Value]:
    """The keys that these requests have a value for; empty without requests."""
    if not records:
        return {}
    duration = max(r.ended or r.sent for r in records) - min(r.sent for r in records)
    prompt = sum(r.prompt_tokens or r.asked_prompt_tokens or 0 for r in records)
    output = sum(r.completion_tokens or 0 for r in records)
    found: dict[str, Value] = {
        "date": started,
        "backend": "openai",
        "endpoint_type": "openai",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(records),
        "request_rate": "inf",
        "max_concurrency": 1,
        "duration": duration,
        "completed": len(records),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(records) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
    }
    for name, values in _times(records).items():
        found |= _statistics(name, values)
    return found


def _times(records: Sequence[Record]) -> dict[str, list[float]]:
    paced = [(r, first, last) for r in records if (first := ttft(r)) is not None and (last := e2e(r)) is not None]
    return {
        "ttft": [first for _, first, _ in paced],
        "tpot": [(last - first) / (n - 1) for r, first, last in paced if (n := r.completion_tokens or 0) > 1],
        "itl": [gap for r in records for gap in chunk_gaps(r)],
        "e2el": [last for _, _, last in paced],
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, Value]:
    if not seconds:
        return {}
    ms = 1e3 * np.array(seconds)
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }
