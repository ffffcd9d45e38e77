"""Models of published shapes with random weights, in every format that the engines of a comparison read.

    python bench/random_models.py qwen2.5-0.5b|llama-3.2-1b|qwen2.5-1.5b|all [--out FOLDER] [--quantize LLAMA_QUANTIZE]

For each shape a folder with ``hf`` (config.json, bf16 safetensors), ``bf16.gguf``, and by llama.cpp's llama-quantize
``q4_1.gguf``, ``q4_0.gguf`` and ``q8_0.gguf``: what ``bench/engine.py --set FOLDER`` takes. Weights are normal with
deviation 0.02 (the configs' initializer_range), norms are 1, biases as weights; speed depends on shapes and formats,
not on values. The vocabulary has the published size and one made-up token an id. 3 to 10 GB a shape on the disk: make
one at a time, and remove its folder after use.

Shapes: config.json of Qwen/Qwen2.5-0.5B, Qwen/Qwen2.5-1.5B (Apache-2.0) and meta-llama/Llama-3.2-1B on Hugging Face.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from biphase.errors import BadInput, BiphaseError, RunFailed
from llama import last_line
from sides import HOW, PEERS

DEVIATION = 0.02
FORMATS = ("Q4_1", "Q4_0", "Q8_0")
CONTEXT = 8192
"""max_position_embeddings as written: rotary tables and caches of the published 32,768 and 131,072 are not needed."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a published config.json."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    norm_eps: float

    @property
    def bias(self) -> bool:
        """Qwen2 adds one to q, k and v."""
        return self.family == "qwen2"


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151_936, 1e6, 1e-6),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128_256, 5e5, 1e-5),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151_936, 1e6, 1e-6),
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
Tensors = dict[str, torch.Tensor]


def config(shape: Shape) -> dict[str, Any]:
    """config.json; all three tie the head to the embedding."""
    scaling = {"rope_scaling": LLAMA3_SCALING} if shape.family == "llama" else {"use_sliding_window": False}
    return {
        "architectures": ["LlamaForCausalLM" if shape.family == "llama" else "Qwen2ForCausalLM"],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "initializer_range": DEVIATION,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **scaling,
    }


def tensors(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the Hugging Face folder, bf16, drawn in order from one seed."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).normal_(0.0, DEVIATION, generator=draw)

    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    rows = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    yield "model.embed_tokens.weight", normal(shape.vocabulary, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, outputs in rows.items():
            yield f"{at}{name}.weight", normal(outputs, hidden)
            if shape.bias:
                yield f"{at}{name}.bias", normal(outputs)
        yield f"{at}self_attn.o_proj.weight", normal(hidden, q)
        yield f"{at}mlp.gate_proj.weight", normal(shape.intermediate, hidden)
        yield f"{at}mlp.up_proj.weight", normal(shape.intermediate, hidden)
        yield f"{at}mlp.down_proj.weight", normal(hidden, shape.intermediate)
        yield f"{at}input_layernorm.weight", ones.clone()
        yield f"{at}post_attention_layernorm.weight", ones.clone()
    yield "model.norm.weight", ones.clone()


def write_folder(shape: Shape, folder: Path) -> Tensors:
    """The Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    found = dict(tensors(shape))
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return found


def write_gguf(shape: Shape, found: Tensors, path: Path) -> None:
    """The same tensors as bf16 GGUF: q and k of the llama architecture interleaved, norms and biases in float32."""
    writer = gguf.GGUFWriter(path, shape.family)
    _metadata(writer, shape)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.family.upper()], shape.layers)
    for name, tensor in found.items():
        ours = names.get_name(name, (".weight", ".bias"))
        if ours is None:
            raise RunFailed(f"the gguf package knows no name for {name}")
        _add(writer, shape, ours, tensor)
    if shape.family == "llama":
        writer.add_tensor("rope_freqs.weight", rope_divisors(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, shape: Shape, name: str, tensor: torch.Tensor) -> None:
    if shape.family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        tensor = interleave(tensor, shape.heads if "attn_q" in name else shape.kv_heads)
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    data = tensor.contiguous().view(torch.uint8).numpy()  # the writer takes bf16 as its bytes
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows i and i + D/2 of each head side by side, as llama.cpp's rotary embedding pairs them."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def rope_divisors(shape: Shape) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """What each frequency is divided by under Llama 3's scaling (Llama 3.1's reference code, apply_scaling)."""
    base = LLAMA3_SCALING
    factor, original = float(str(base["factor"])), float(str(base["original_max_position_embeddings"]))
    low, high = float(str(base["low_freq_factor"])), float(str(base["high_freq_factor"]))
    wavelength = 2 * np.pi * shape.rope_theta ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray[tuple[int], np.dtype[np.float32]] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors


def _metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _vocabulary(writer, shape.vocabulary)


def _vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes and made-up words in SentencePiece's form, which llama.cpp and this engine read without merges."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *(f"▁w{n}" for n in range(size - len(pieces) - 1))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(size - 259)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def quantize(program: Path, source: Path, folder: Path) -> None:
    """The formats that llama-quantize makes; its default keeps a tied head in Q6_K or Q8_0 as llama.cpp would."""
    for form in FORMATS:
        target = folder / f"{form.lower()}.gguf"
        done = subprocess.run(
            [str(program), str(source), str(target), form], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RunFailed(f"llama-quantize ended with status {done.returncode}: {last_line(done.stderr)}")


def make(name: str, out: Path, program: Path) -> Path:
    """All files of one shape."""
    folder = out / name
    found = write_folder(SHAPES[name], folder / "hf")
    write_gguf(SHAPES[name], found, folder / "bf16.gguf")
    quantize(program, folder / "bf16.gguf", folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=(*SHAPES, "all"))
    parser.add_argument("--out", type=Path, default=PEERS / "random")
    parser.add_argument("--quantize", type=Path, default=PEERS / "llama" / "bin" / "llama-quantize")
    asked = parser.parse_args()
    try:
        if not asked.quantize.is_file():
            raise BadInput(f"llama-quantize is not at {asked.quantize}: {HOW['llama.cpp']}")
        for name in SHAPES if asked.shape == "all" else (asked.shape,):
            print(make(name, asked.out, asked.quantize), flush=True)
    except BiphaseError as error:
        raise SystemExit(f"bench/random_models.py: {error}") from error


if __name__ == "__main__":
    main()
