"""The transformers side of bench/engine.py; run by an interpreter that has transformers, and nothing of biphase."""

import json
import os
import statistics
import sys
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def answer(model: Any, question: dict[str, Any]) -> float:
    """Seconds of a prefill to the last token's logits, or the median seconds of a greedy decode step."""
    decode = question["phase"] == "decode"
    length = question["context"] if decode else question["tokens"]
    ids = torch.tensor([[1000 + i * 7919 % 30000 for i in range(length)]])
    started = perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    if not decode:
        return perf_counter() - started
    steps = []
    for _ in range(question["tokens"]):
        started = perf_counter()
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        steps.append(perf_counter() - started)
    return statistics.median(steps)


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    print(json.dumps({"about": f"transformers {transformers.__version__} bfloat16"}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": answer(model, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
