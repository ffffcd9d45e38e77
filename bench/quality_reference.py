"""The reference of bench/quality.py: transformers in float32 on the dequantised weights of a GGUF file."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig

from answering import private_stdout, serve


@torch.inference_mode()
def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: of the token after each."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)


def windows(model: Any, line: dict[str, Any]) -> dict[str, Any]:
    """As quality_worker.py; one pass is both."""
    first, texts = line["first"], line["windows"]
    rows = [logprobs(model, text[:-1])[first:].gather(1, _after(text, first)).flatten().tolist() for text in texts]
    return {"decode": rows, "prefill": [value for row in rows for value in row[:: line["every"]]]}


def _after(text: list[int], first: int) -> torch.Tensor:
    return torch.tensor(text[first + 1 :])[:, None]


def golden(model: Any, line: dict[str, Any]) -> dict[str, Any]:
    """As quality_worker.py."""
    found = [
        logprobs(model, [*case["prompt"], *case["output"]])[len(case["prompt"]) - 1 : -1] for case in line["cases"]
    ]
    tops = [rows[0].topk(line["top"]) for rows in found]
    return {
        "likeliest": [rows.argmax(-1).tolist() for rows in found],
        "first": [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops],
    }


def main() -> None:
    out = private_stdout()
    path = Path(sys.argv[1])
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=config
    ).eval()
    kinds = {"windows": windows, "golden": golden}
    serve(out, f"transformers {transformers.__version__}, float32", lambda line: kinds[line["kind"]](model, line))


if __name__ == "__main__":
    main()
