"""The keys and values of all sequences, in blocks of one pool.

k and v are [layers, blocks, kv_heads, block_size, head_dim]: the tokens of one head in one block lie together, so that
decode reads runs of block_size * head_dim elements. Block ids come from the scheduler; nothing here owns or frees them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from biphase.engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCache:
    """``k[layer]`` and ``v[layer]`` are [blocks, kv_heads, block_size, head_dim] in the model's dtype."""

    k: Tensor
    v: Tensor

    @property
    def block_size(self) -> int:
        return int(self.k.shape[3])

    @property
    def num_blocks(self) -> int:
        return int(self.k.shape[1])


def allocate(config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
    """Zeros that the operating system hands out lazily: memory is used as blocks are first written.

    numpy asks it for zeroed pages; torch.zeros would write every one of them now, a second for each gigabyte.
    """
    shape = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim * dtype.itemsize)
    k, v = (torch.from_numpy(np.zeros(shape, dtype=np.uint8)).view(dtype) for _ in range(2))
    return KVCache(k, v)
