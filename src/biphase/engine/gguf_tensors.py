"""Tensors of a GGUF file, dequantised by the ``gguf`` library into torch."""

from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from biphase.engine.config import ModelConfig, from_gguf
from biphase.errors import BadInput
from biphase.roofline.gguf_file import read_gguf

SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


class GgufTensors:
    """A ``TensorSource`` over one GGUF file. Quantised rows are dequantised in float32, then rounded once."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        file = read_gguf(path)
        self._tensors, self._data_start = file.tensors, file.data_start
        shapes = {name: tuple(reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        self.config: ModelConfig = from_gguf(file.metadata, shapes, self.where)
        for name, tensor in self._tensors.items():
            kind = gguf.GGMLQuantizationType(tensor.kind).name
            if kind not in SUPPORTED:
                raise BadInput(f"{path}: tensor {name} is {kind}; this engine reads {', '.join(SUPPORTED)}")
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._tensors[name]
        start = self._data_start + tensor.offset
        rows = np.asarray(self._bytes[start : start + tensor.stored_bytes]).reshape(prod(tensor.shape[1:]), -1)
        array = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind))
        values = torch.from_numpy(np.require(array, dtype=np.float32, requirements=["C", "W"]))
        values = values.view(*reversed(tensor.shape))
        if self.config.family == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
            heads = self.config.num_heads if ".attn_q." in name else self.config.num_kv_heads
            values = _unpermute(values, heads)
        return values.to(dtype)


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two halves of each q and k head of the llama architecture (pairs i, i+1); halves again."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
