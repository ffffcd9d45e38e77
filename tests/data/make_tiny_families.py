"""Makes tiny_families.json: logits of transformers for tiny models of each family, with weights from a formula.

Run where transformers is installed (5.24.0 was used), with the output to tests/data/tiny_families.json.
"""

import json
import zlib

import numpy as np

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {"rope_type": "default", "rope_theta": 1000000.0}
FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": PLAIN},
    "llama3": {"model_type": "llama", "tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": None, "rope_parameters": LONG},
    "mistral, window": {
        "model_type": "mistral", "head_dim": 32, "num_hidden_layers": 3, "max_position_embeddings": 512,
        "sliding_window": 19, "rope_parameters": LONG,
    },
    "mistral, long window": {
        "model_type": "mistral", "head_dim": 16, "max_position_embeddings": 768, "sliding_window": 300,
        "rope_parameters": LONG,
    },
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "rope_parameters": LONG},
    "qwen2, window": {
        "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 35,
        "max_position_embeddings": 512,
        "rope_parameters": LONG,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "use_sliding_window": False, "rope_parameters": LONG},
}  # fmt: skip
TOKENS = [int(i * 37 % 128) for i in range(40)]
LONG_TOKENS = [int(i * i * 37 % 127) for i in range(700)]
"""For windows: far beyond them, and where one is long also in more than one run of attention."""


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Deterministic weights from the tensor's name: noise for matrices and biases, near 1 for norms."""
    noise = np.random.Generator(np.random.Philox(zlib.crc32(name.encode()))).standard_normal(shape)
    return (1 + 0.1 * noise if "norm" in name else 0.1 * noise).astype(np.float32)


def main() -> None:
    import torch
    import transformers

    cases = []
    for label, extra in FAMILIES.items():
        config = transformers.AutoConfig.for_model(**(SHAPE | extra))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            parameter.data = torch.from_numpy(values(name, tuple(parameter.shape)))
        model.tie_weights()
        with torch.inference_mode():
            window = extra.get("sliding_window") or 0
            tokens = LONG_TOKENS if window > 100 else LONG_TOKENS[:340] if window else TOKENS
            logits = model(torch.tensor([tokens])).logits[0]
        names = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        rows = {
            str(row): [round(float(x), 5) for x in logits[row]]
            for row in (0, 17, len(tokens) // 2 - 1, len(tokens) - 1)
        }
        cases.append({"label": label, "config": SHAPE | extra, "tensors": names, "tokens": tokens, "logits": rows})
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    print(json.dumps({"made_with": made_with, "cases": cases}))


if __name__ == "__main__":
    main()
