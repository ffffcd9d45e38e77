"""The transformers side of bench/engine.py; run by an interpreter that has transformers, and nothing of biphase.

Arguments: a Hugging Face folder, and bfloat16 or float32.
"""

import os
import sys
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from answering import Question, private_stdout, prompt, serve


@torch.inference_mode()
def answer(model: Any, question: Question) -> float:
    """Seconds of a prefill to the last token's logits, or of greedy decode steps of a batch."""
    decode = question.phase == "decode"
    length = question.context if decode else question.tokens
    ids = torch.tensor([prompt(length, row) for row in range(question.sequences)])
    started = perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    if not decode:
        return perf_counter() - started
    started = perf_counter()
    for _ in range(question.tokens):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    return perf_counter() - started


def main() -> None:
    out = private_stdout()
    folder, dtype = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    about = f"transformers {transformers.__version__}, torch {torch.__version__}, {dtype}"
    serve(out, about, lambda line: {"seconds": answer(model, Question(**line))})


if __name__ == "__main__":
    main()
