"""From a model's file to the panels that compiled programs read."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from biphase.engine.config import ModelConfig
from biphase.engine.kernels.image import Floats, Image, PackedModel, Placed, place, shape_of
from biphase.engine.kernels.panels import Kind, PanelMatrix, pack_blocks, pack_values, quantize_rows
from biphase.engine.weights import TensorSource, inverse_frequencies, require, require_shape

_KINDS = {torch.bfloat16: Kind.BF16, torch.float16: Kind.F16, torch.float32: Kind.F32}


def pack(
    config: ModelConfig, source: TensorSource, int8: bool = False, on_layer: Callable[[int], None] = lambda _: None
) -> PackedModel:
    """Read every tensor in the file's own format and repack it, on all cores (numpy and torch release the GIL).

    ``int8`` requantises every matrix to one byte a weight with one scale a row. Raises ``BadInput`` naming a tensor
    that is missing or has the wrong shape.
    """
    h, packer = config.hidden_size, _Packer(config, source, int8)
    with ThreadPoolExecutor() as pool:
        layers = pool.map(packer.layer, range(config.num_layers))
        head = pool.submit(packer.matrix, "token_embd.weight", config.vocab_size, h)
        output = None if config.tied_embeddings else pool.submit(packer.matrix, "output.weight", config.vocab_size, h)
        matrices: list[list[Placed]] = []
        for index, layer in enumerate(layers):
            matrices += layer
            on_layer(index)
        embedding = [Placed(head.result())]
        matrices.append(embedding if output is None else [Placed(output.result())])
        if output is not None:
            matrices.append(embedding)
    table, panels, weights = place(matrices)
    if output is None:
        table = np.concatenate([table, table[-1:]])
    cos, sin = _rotary(config, source)
    image = Image(table, panels, packer.norms(), packer.biases(), packer.qk_norms(), cos, sin)
    return PackedModel(shape_of(config), image, weights)


class _Packer:
    def __init__(self, config: ModelConfig, source: TensorSource, int8: bool) -> None:
        self._config, self._source, self._int8 = config, source, int8

    def layer(self, index: int) -> list[list[Placed]]:
        """The four matrices of a layer: q, k, v; o; gate and up; down."""
        c, prefix = self._config, f"blk.{index}."
        parts = (("attn_q", c.q_size), ("attn_k", c.kv_size), ("attn_v", c.kv_size))
        names = [f"{prefix}{name}.weight" for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")]
        h, i = c.hidden_size, c.intermediate_size
        return [
            self._joined([(f"{prefix}{name}.weight", rows) for name, rows in parts], h),
            [Placed(self.matrix(names[0], h, c.q_size))],
            [Placed(self.matrix(names[1], i, h)), Placed(self.matrix(names[2], i, h), i)],
            [Placed(self.matrix(names[3], h, i))],
        ]

    def _joined(self, parts: Sequence[tuple[str, int]], inner: int) -> list[Placed]:
        placed, column = [], 0
        for name, rows in parts:
            placed.append(Placed(self.matrix(name, rows, inner), column))
            column += rows
        return placed

    def matrix(self, name: str, rows: int, inner: int) -> PanelMatrix:
        """One tensor in panels of its own format."""
        require(self._source, name)
        blocks = self._source.blocks(name)
        if blocks is not None:
            require_shape(self._source, name, blocks.q.shape, (rows, inner))
            return quantize_rows(blocks.dequantized()) if self._int8 else pack_blocks(blocks)
        tensor = self._source.read(name, self._source.dtype(name))
        require_shape(self._source, name, tuple(tensor.shape), (rows, inner))
        if self._int8:
            return quantize_rows(tensor.float().numpy())
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return pack_values(bits.contiguous().numpy(), _KINDS[tensor.dtype])

    def norms(self) -> Floats:
        layers = range(self._config.num_layers)
        names = [f"blk.{n}.{kind}_norm.weight" for n in layers for kind in ("attn", "ffn")]
        return self._vectors([*names, "output_norm.weight"], self._config.hidden_size)

    def biases(self) -> Floats:
        if not self._config.qkv_bias:
            return np.zeros((0, 0), dtype=np.float32)
        c, layers = self._config, range(self._config.num_layers)
        parts = (("attn_q", c.q_size), ("attn_k", c.kv_size), ("attn_v", c.kv_size))
        columns = [self._vectors([f"blk.{n}.{name}.bias" for n in layers], size) for name, size in parts]
        return np.concatenate(columns, axis=1)

    def qk_norms(self) -> Floats:
        c = self._config
        if not c.qk_norm:
            return np.zeros((0, 2, c.head_dim), dtype=np.float32)
        names = [f"blk.{n}.attn_{kind}_norm.weight" for n in range(c.num_layers) for kind in "qk"]
        return self._vectors(names, c.head_dim).reshape(c.num_layers, 2, c.head_dim)

    def _vectors(self, names: Sequence[str], length: int) -> Floats:
        return np.stack([self._vector(name, length).numpy() for name in names])

    def _vector(self, name: str, length: int) -> Tensor:
        require(self._source, name)
        tensor = self._source.read(name, torch.float32)
        require_shape(self._source, name, tuple(tensor.shape), (length,))
        return tensor


def _rotary(config: ModelConfig, source: TensorSource) -> tuple[Floats, Floats]:
    angles = torch.arange(config.max_position).float()[:, None] * inverse_frequencies(config, source)
    return angles.cos().numpy(), angles.sin().numpy()
