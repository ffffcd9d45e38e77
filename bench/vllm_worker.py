"""vLLM's side of bench/engine.py, through its offline LLM class; run by an interpreter that has vLLM, not biphase.

Arguments: a Hugging Face folder, and bfloat16 or float32.
"""

import importlib
import os
import sys
from itertools import count
from time import perf_counter
from typing import Any

from answering import Question, private_stdout, prompt, serve

asked = count()


def vllm() -> Any:
    """The package, which is loaded only once its environment is set."""
    return importlib.import_module("vllm")


def load(folder: str, dtype: str) -> Any:
    """Without prefix cache; a prompt of a row runs whole. The engine has a process of its own, as in serving."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # vLLM looks for compilers and its own programs beside the interpreter
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # noqa: PTH120
    return vllm().LLM(
        folder,
        dtype=dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,  # keeps the moments of each request's tokens
    )


def answer(llm: Any, question: Question) -> float:
    """Seconds of a generate call of one token, or between the first tokens and the last."""
    decode = question.phase == "decode"
    length, outputs = (question.context, question.tokens + 1) if decode else (question.tokens, 1)
    prompts = [{"prompt_token_ids": prompt(length, next(asked) % 20000)} for _ in range(question.sequences)]
    params = vllm().SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
    started = perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    if not decode:
        return perf_counter() - started
    return float(max(o.metrics.last_token_ts for o in found) - max(o.metrics.first_token_ts for o in found))


def main() -> None:
    out = private_stdout()
    folder, dtype = sys.argv[1:]
    llm = load(folder, dtype)
    about = f"vLLM {vllm().__version__}, {dtype}"
    serve(out, about, lambda line: {"seconds": answer(llm, Question(**line))})


if __name__ == "__main__":
    main()
