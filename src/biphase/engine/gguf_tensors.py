"""Tensors of a GGUF file, dequantised by the ``gguf`` library into torch."""

from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from biphase.engine.config import ModelConfig, from_gguf
from biphase.engine.gguf_blocks import read_blocks
from biphase.engine.kernels.panels import Blocks
from biphase.errors import BadInput
from biphase.roofline.gguf_file import read_gguf

_PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16}
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
        array = gguf.quants.dequantize(self._raw(name), gguf.GGMLQuantizationType(tensor.kind))
        values = torch.from_numpy(np.require(array, dtype=np.float32, requirements=["C", "W"]))
        values = values.view(*reversed(tensor.shape))
        order = self._row_order(name)
        return (values if order is None else values[order]).to(dtype)

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN.get(gguf.GGMLQuantizationType(self._tensors[name].kind).name, torch.float32)

    def blocks(self, name: str) -> Blocks | None:
        blocks = read_blocks(self._raw(name), gguf.GGMLQuantizationType(self._tensors[name].kind).name)
        order = self._row_order(name)
        return blocks if blocks is None or order is None else blocks.in_order(order)

    def _raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes [rows, bytes of a row]."""
        tensor = self._tensors[name]
        start = self._data_start + tensor.offset
        return np.asarray(self._bytes[start : start + tensor.stored_bytes]).reshape(prod(tensor.shape[1:]), -1)

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """GGUF interleaves the two halves of each q and k head of the llama architecture (pairs i, i + 1)."""
        if self.config.family != "llama" or not name.endswith((".attn_q.weight", ".attn_k.weight")):
            return None
        heads = self.config.num_heads if ".attn_q." in name else self.config.num_kv_heads
        rows = np.arange(heads * self.config.head_dim)
        return rows.reshape(heads, -1, 2).transpose(0, 2, 1).ravel()
