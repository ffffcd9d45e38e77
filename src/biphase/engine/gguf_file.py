"""Tensors of a GGUF file, dequantised by the ``gguf`` library into torch."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from biphase.engine.config import ModelConfig, from_gguf
from biphase.errors import BadInput

SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


class GgufFile:
    """A ``TensorSource`` over one GGUF file. Quantised rows are dequantised in float32, then rounded once."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: [int(n) for n in reversed(tensor.shape)] for name, tensor in self._tensors.items()}
        self.config: ModelConfig = from_gguf(_metadata(reader), shapes, self.where)
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in SUPPORTED:
                kind = tensor.tensor_type.name
                raise BadInput(f"{path}: tensor {tensor.name} is {kind}; this engine reads {', '.join(SUPPORTED)}")

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._tensors[name]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(np.require(array, dtype=np.float32, requirements=["C", "W"]))
        if self.config.family == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
            heads = self.config.num_heads if ".attn_q." in name else self.config.num_kv_heads
            values = _unpermute(values, heads)
        return values.to(dtype)


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two halves of each q and k head of the llama architecture (pairs i, i+1); halves again."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _open(path: Path) -> Any:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} is not a readable GGUF file (cut short or damaged?): {error}; download it again"
        ) from error


def _metadata(reader: Any) -> dict[str, Any]:
    """Scalar fields only: the vocabulary is read by the process that holds the tokenizer."""
    return {
        key: field.contents()
        for key, field in reader.fields.items()
        if field.types and field.types[0] != gguf.GGUFValueType.ARRAY
    }
