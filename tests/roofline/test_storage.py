"""Bytes of stored weights: formats against their definitions, and which modules a checkpoint leaves out."""

from typing import Any

import pytest

from biphase.errors import BadInput
from biphase.roofline import formats
from biphase.roofline.quantization import matches
from tests.roofline.shapes import LLAMA, MOE, model


@pytest.mark.parametrize(
    ("form", "expected"),
    [  # bytes per weight from the definitions of the formats
        (formats.BF16, 2.0),
        (formats.MXFP4, 0.53125),
        (formats.NVFP4, 0.5625),
        (formats.FP8_BLOCK, 1 + 4 / 16384),
        (formats.INT4, 0.5 + 2.5 / 128),
        (formats.GGML_FORMATS[2], 18 / 32),
        (formats.GGML_FORMATS[8], 34 / 32),
        (formats.GGML_FORMATS[12], 0.5625),
        (formats.GGML_FORMATS[14], 0.8203125),
    ],
)
def test_bytes_per_weight(form: formats.Format, expected: float) -> None:
    assert form.bytes_per_weight == pytest.approx(expected, rel=1e-6)


def test_llama2_7b_files_of_llama_cpp() -> None:
    # llama.cpp discussion 4167: F16 12.55 GiB, Q8_0 6.67 GiB, Q4_0 with a Q6_K head 3.56 GiB, of 6.738 B parameters
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    norms = 65 * 4096 * 4

    def gib(kind: int, head: int) -> float:
        rows = matrices // 4096
        body = formats.GGML_FORMATS[kind].stored_bytes(4096, rows)
        return (body + formats.GGML_FORMATS[head].stored_bytes(4096, 32000) + norms) / 2**30

    assert gib(1, 1) == pytest.approx(12.55, abs=0.005)
    assert gib(8, 8) == pytest.approx(6.67, abs=0.005)
    assert gib(2, 14) == pytest.approx(3.56, abs=0.005)


def test_groups_that_are_not_full_are_stored_whole() -> None:
    assert formats.FP8_BLOCK.stored_bytes(129, 1) == 129 + 2 * 4
    assert formats.GGML_FORMATS[2].stored_bytes(33, 2) == 2 * 2 * 18


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("gate_proj", "model.layers.0.mlp.gate_proj", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        ("model.language_model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
    ],
)
def test_modules_left_out(pattern: str, path: str, expected: bool) -> None:
    assert matches(path, pattern) is expected


def by_format(quantization: dict[str, Any], base: dict[str, Any] = LLAMA) -> dict[str, int]:
    return model(base, quantization_config=quantization).formats


LINEAR = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)  # weights of both layers
ENDS = 2 * 2 * 6400  # bytes of embedding and head in bf16


def test_quantised_checkpoints_by_method() -> None:
    assert by_format({"quant_method": "fp8"}) == {"fp8": LINEAR + 14 * 4, "bf16": ENDS}
    blocks = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    assert by_format(blocks)["fp8_block"] == LINEAR + LINEAR // 1024 * 4
    per_row = {"quant_method": "fbgemm_fp8"}
    assert by_format(per_row)["fp8_row"] == LINEAR + 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64) * 4
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32}
    assert by_format(awq)["awq_int4"] == LINEAR // 2 + LINEAR // 32 * 5 // 2
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    assert by_format(gptq)["gptq_int4"] == LINEAR // 2 + LINEAR // 32 * 5 // 2 + 2 * (6 * 64 + 96) * 4
    assert by_format({"quant_method": "modelopt", "quant_algo": "NVFP4"})["nvfp4"] == LINEAR * 9 // 16 + 14 * 8


def test_compressed_tensors_with_an_ignore_list() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*layers\\.0\\.self_attn.*"],
    }
    kept = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert by_format(quantization) == {"fp8": LINEAR - kept + 10 * 4, "bf16": ENDS + 2 * kept}


def test_mxfp4_is_for_experts_only() -> None:
    found = by_format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, MOE)
    experts = 2 * 8 * 3 * 64 * 32
    assert found["mxfp4"] == experts * 17 // 32


def test_routers_are_never_quantised() -> None:
    found = by_format({"quant_method": "fp8"}, MOE)
    assert found["bf16"] == ENDS + 2 * 2 * 8 * 64


def test_names_of_dtypes() -> None:
    assert formats.weight_format("BFLOAT16") is formats.BF16
    with pytest.raises(BadInput, match="unknown weight dtype 'fp3'"):
        formats.weight_format("fp3")
    with pytest.raises(BadInput, match="unknown KV dtype 'fp3'"):
        formats.kv_element_bytes("fp3")


def test_a_broken_expression_in_an_ignore_list() -> None:
    with pytest.raises(BadInput, match="no regular expression"):
        by_format({"quant_method": "fp8", "modules_to_not_convert": ["re:("]})
