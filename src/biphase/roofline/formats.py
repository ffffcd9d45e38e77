"""How a weight matrix is stored: bits of a weight, scales beside it, and the dtype that multiplies it.

Block formats, bytes per weight: MXFP4 17/32, NVFP4 9/16, fp8 in 128x128 blocks 1 + 4/16384, AWQ and GPTQ in groups of
128 about 0.519. GGUF block sizes are those of ggml (ggml-common.h): Q4_0 is 18 bytes for 32 weights, Q6_K 210 for 256.
"""

from dataclasses import dataclass
from functools import cached_property

from biphase.errors import BadInput


@dataclass(frozen=True)
class Format:
    """Storage of a matrix of ``outputs`` rows by ``inputs`` columns; groups run along the inputs.

    ``bits`` of each weight; ``group`` inputs by ``group_rows`` outputs share ``group_bits`` of scale and zero point
    (group 0: the whole row); ``row_bits`` for each output, ``column_bits`` for each input, ``tensor_bytes`` once.
    """

    name: str
    bits: float
    compute: str
    group: int = 0
    group_rows: int = 1
    group_bits: int = 0
    row_bits: int = 0
    column_bits: int = 0
    tensor_bytes: int = 0

    def stored_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of the matrix with its scales; half-filled groups are stored whole."""
        across = -(-inputs // self.group) if self.group else 1
        down = -(-outputs // self.group_rows)
        bits = inputs * outputs * self.bits + across * down * self.group_bits
        bits += outputs * self.row_bits + inputs * self.column_bits
        return int(-(-bits // 8)) + self.tensor_bytes

    @cached_property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight in a large matrix, scales included."""
        side = 16384
        return self.stored_bytes(side, side) / side**2


FP32 = Format("fp32", 32, "fp32")
BF16 = Format("bf16", 16, "bf16")
FP16 = Format("fp16", 16, "fp16")
FP8 = Format("fp8", 8, "fp8", tensor_bytes=4)
FP8_ROW = Format("fp8_row", 8, "fp8", row_bits=32)
FP8_BLOCK = Format("fp8_block", 8, "fp8", group=128, group_rows=128, group_bits=32)
INT8 = Format("int8", 8, "int8", row_bits=32)
MXFP4 = Format("mxfp4", 4, "fp4", group=32, group_bits=8)
# one fp8 scale for 16 weights, and two fp32 scales of the tensor (weight, input)
NVFP4 = Format("nvfp4", 4, "fp4", group=16, group_bits=8, tensor_bytes=8)


def grouped_integer(name: str, bits: int, group: int, *, zero_points: bool, order: bool = False) -> Format:
    """AWQ and GPTQ: an fp16 scale a group, a zero point of ``bits`` where asymmetric, a 4-byte g_idx in GPTQ."""
    scale = 16 + (bits if zero_points else 0)
    return Format(name, bits, "bf16", group=max(group, 0), group_bits=scale, column_bits=32 if order else 0)


INT4 = grouped_integer("int4", 4, 128, zero_points=True)

# What --dtype and --kv-dtype take; int4 is weight-only in groups of 128 as AWQ stores it.
WEIGHT_FORMATS: dict[str, Format] = {
    f.name: f for f in (FP32, BF16, FP16, FP8, FP8_ROW, FP8_BLOCK, INT8, INT4, MXFP4, NVFP4)
}
FP8_DS_MLA = "fp8_ds_mla"
KV_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625,
                              # vLLM for MLA: 512 fp8 + 16 bytes of scales + 64 bf16 = 656 bytes for 576 elements
                              FP8_DS_MLA: 656 / 576}  # fmt: skip


def _ggml(name: str, weights: int, block_bytes: int) -> Format:
    return Format(name, 0, "bf16", group=weights, group_bits=block_bytes * 8)


# ggml type id -> format (ggml.h enum ggml_type; block bytes of ggml-common.h)
GGML_FORMATS: dict[int, Format] = {
    0: Format("F32", 32, "fp32"),
    1: Format("F16", 16, "fp16"),
    2: _ggml("Q4_0", 32, 18),
    3: _ggml("Q4_1", 32, 20),
    6: _ggml("Q5_0", 32, 22),
    7: _ggml("Q5_1", 32, 24),
    8: _ggml("Q8_0", 32, 34),
    10: _ggml("Q2_K", 256, 84),
    11: _ggml("Q3_K", 256, 110),
    12: _ggml("Q4_K", 256, 144),
    13: _ggml("Q5_K", 256, 176),
    14: _ggml("Q6_K", 256, 210),
    15: _ggml("Q8_K", 256, 292),
    16: _ggml("IQ2_XXS", 256, 66),
    17: _ggml("IQ2_XS", 256, 74),
    18: _ggml("IQ3_XXS", 256, 98),
    19: _ggml("IQ1_S", 256, 50),
    20: _ggml("IQ4_NL", 32, 18),
    21: _ggml("IQ3_S", 256, 110),
    22: _ggml("IQ2_S", 256, 82),
    23: _ggml("IQ4_XS", 256, 136),
    29: _ggml("IQ1_M", 256, 56),
    30: Format("BF16", 16, "bf16"),
    34: _ggml("TQ1_0", 256, 54),
    35: _ggml("TQ2_0", 256, 66),
    39: _ggml("MXFP4", 32, 17),
}


def weight_format(name: str) -> Format:
    """The format of a name given by a user; BadInput lists the known ones."""
    aliases = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "f16": "fp16", "f32": "fp32", "half": "fp16"}
    key = name.lower().replace("-", "_")
    key = aliases.get(key, key)
    if key not in WEIGHT_FORMATS:
        raise BadInput(f"unknown weight dtype {name!r}; known: {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[key]


def kv_element_bytes(name: str) -> float:
    """Bytes of one element of the KV cache; BadInput lists the known dtypes."""
    key = {"auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}.get(name, name)
    if key not in KV_BYTES:
        raise BadInput(f"unknown KV dtype {name!r}; known: {', '.join(KV_BYTES)}")
    return KV_BYTES[key]
