"""GGUF headers: a real file, files written here field by field, and files that are broken in every way."""

import struct
from pathlib import Path
from typing import Any

import pytest

from biphase.errors import BadInput
from biphase.models import locate
from biphase.roofline.catalogue import load
from biphase.roofline.gguf import from_gguf_file, from_gguf_metadata
from biphase.roofline.gguf_file import read_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 3,
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 512,
    "llama.vocab_size": 100,
}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def key_value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return string(key) + struct.pack("<I", 8) + string(value)
    if isinstance(value, list):
        body = b"".join(map(string, value))
        return string(key) + struct.pack("<IIQ", 9, 8, len(value)) + body
    return string(key) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...], kind: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)


def tensors(tied: bool = True) -> list[bytes]:
    matrices = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64)}
    matrices |= {"ffn_gate": (64, 96), "ffn_up": (64, 96), "ffn_down": (96, 64)}
    found = [tensor("token_embd.weight", (64, 100), 8), tensor("output_norm.weight", (64,), 0)]
    for i in range(2):
        found += [tensor(f"blk.{i}.{name}.weight", shape, 3) for name, shape in matrices.items()]
        found += [tensor(f"blk.{i}.{name}.weight", (64,), 0) for name in ("attn_norm", "ffn_norm")]
    return found if tied else [*found, tensor("output.weight", (64, 100), 14)]


DATA = 2**16  # bytes after the header: more than the largest tensor here, and every offset is 0


def header(metadata: dict[str, Any], table: list[bytes], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(table), len(metadata))
    return head + b"".join(key_value(k, v) for k, v in metadata.items()) + b"".join(table)


def gguf(metadata: dict[str, Any], table: list[bytes], version: int = 3) -> bytes:
    return header(metadata, table, version) + bytes(DATA)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_smollm2_has_the_parameters_and_bytes_of_its_tensor_table() -> None:
    found = load("smollm2-135m")
    # SmolLM2-135M: 134,515,008 parameters; the table's bytes add up to 96,576,768
    assert found.parameters == 134_515_008
    assert found.weight_bytes == 96_576_768
    assert found.tied
    assert found.notes == ()
    assert found.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 2
    table = read_gguf(locate("smollm2-135m")).tensors.values()
    assert sum(t.stored_bytes for t in table) == found.weight_bytes


def test_a_small_file_by_hand(tmp_path: Path) -> None:
    found = from_gguf_file(written(tmp_path / "m.gguf", gguf(METADATA, tensors())))
    matrices = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
    assert found.parameters == 6400 + matrices + 5 * 64
    assert found.weight_bytes == 6400 * 34 // 32 + matrices * 20 // 32 + 5 * 64 * 4
    assert found.max_context == 512
    untied = from_gguf_file(written(tmp_path / "u.gguf", gguf(METADATA, tensors(tied=False))))
    assert untied.parameters == found.parameters + 6400
    assert untied.formats["Q6_K"] == 100 * 210  # a row of 64 fills one block of 256


def test_a_table_that_says_more_than_the_metadata_is_noted(tmp_path: Path) -> None:
    more = [*tensors(), tensor("blk.0.surprise.weight", (64, 64), 0), tensor("rope_freqs.weight", (32,), 0)]
    found = from_gguf_file(written(tmp_path / "m.gguf", gguf(METADATA, more)))
    assert "parameters" in found.notes[0]


def test_biases_of_qwen2_lie_in_fp32(tmp_path: Path) -> None:
    metadata = {k.replace("llama.", "qwen2."): v for k, v in METADATA.items()} | {"general.architecture": "qwen2"}
    biases = [("attn_q", 64), ("attn_k", 32), ("attn_v", 32)]
    table = tensors() + [tensor(f"blk.{i}.{name}.bias", (n,), 0) for i in range(2) for name, n in biases]
    found = from_gguf_file(written(tmp_path / "q.gguf", gguf(metadata, table)))
    plain = from_gguf_file(written(tmp_path / "l.gguf", gguf(METADATA, tensors())))
    assert found.notes == plain.notes == ()  # parameters and bytes are those of the table
    assert found.weight_bytes == plain.weight_bytes + 2 * 128 * 4


def test_metadata_alone_takes_the_file_type_and_says_so() -> None:
    found = from_gguf_metadata(METADATA)
    assert set(found.formats) == {"Q4_1"}
    assert "general.file_type" in found.notes[0]
    with pytest.raises(BadInput, match="file_type 99 is not known"):
        from_gguf_metadata({**METADATA, "general.file_type": 99})


def test_vocabulary_from_the_tokens_when_there_is_no_field() -> None:
    metadata = {k: v for k, v in METADATA.items() if k != "llama.vocab_size"}
    assert from_gguf_metadata({**metadata, "tokenizer.ggml.tokens": ["a", "b", "c"]}).vocabulary == 3


def test_other_architectures_of_gguf() -> None:
    def of(kind: str, **more: int) -> Any:
        base = {k.replace("llama.", f"{kind}."): v for k, v in METADATA.items()}
        extra = {f"{kind}.{k.replace('__', '.')}": v for k, v in more.items()}
        return from_gguf_metadata({**base, **extra, "general.architecture": kind})

    assert of("qwen3", attention__key_length=16).family == "qwen3"
    mixtral = of("llama", expert_count=4, expert_used_count=2)
    assert mixtral.family == "mixtral"
    qwen = of("qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=32)
    assert qwen.layers[0].experts.count == 4
    latent = {"attention__q_lora_rank": 24, "attention__kv_lora_rank": 32, "rope__dimension_count": 8}
    latent |= {"attention__key_length": 24, "attention__value_length": 12, "expert_count": 8, "expert_used_count": 2}
    latent |= {"expert_feed_forward_length": 16, "expert_shared_count": 1, "leading_dense_block_count": 1}
    deepseek = of("deepseek2", **latent)
    assert deepseek.kv_bytes_per_token() == 2 * 40 * 2
    oss = of("gpt-oss", expert_count=4, expert_used_count=2, attention__sliding_window=16)
    assert oss.layers[0].mixer.mask.span == 16


def test_a_file_cut_in_its_header_or_its_weights_gets_one_clear_line(tmp_path: Path) -> None:
    content = gguf(METADATA, tensors())
    ends = [*range(0, len(header(METADATA, tensors())), 7), len(content) - DATA + 100]
    for end in ends:
        path = written(tmp_path / "cut.gguf", content[:end])
        with pytest.raises(BadInput) as caught:
            from_gguf_file(path)
        assert "cut short" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGML" + bytes(40), "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "a tensor count of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "a key count of"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "a string of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 77), "value type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 4, 2**40), "an array of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "arrays of type 9"),
        (gguf(METADATA, [tensor("t", (64, 64), 99)]), "ggml type 99"),
        (gguf(METADATA, [tensor("t", (0, 64), 0)]), "has the shape (0, 64)"),
        (gguf(METADATA, [string("t") + struct.pack("<I", 9)]), "9 dimensions"),
        (gguf(METADATA, []), "is missing from the file"),
        (gguf({**METADATA, "general.architecture": "mamba"}, []), "general.architecture is 'mamba'"),
        (gguf({"general.architecture": "llama"}, []), "the GGUF key llama.block_count is missing"),
    ],
)
def test_broken_files_get_one_clear_line(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        from_gguf_file(written(tmp_path / "b.gguf", content))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
