"""The blocks of GGUF's quantised formats as numbers, without loss: integers, scales and offsets apart.

Layouts: ggml's ``ggml-common.h`` (block_q4_0, block_q4_1, block_q8_0, block_q4_K, block_q6_K).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from biphase.engine.kernels.panels import Blocks, Kind

Raw = NDArray[np.uint8]


def read_blocks(raw: Raw, kind: str) -> Blocks | None:
    """The stored bytes [rows, bytes of a row] of one matrix; None for a format whose elements are plain floats."""
    reader = _READERS.get(kind)
    return None if reader is None else reader(raw)


def _half(blocks: Raw, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(qs: Raw) -> Raw:
    """[..., n] bytes to [..., 2 n] values: the low nibbles, then the high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _q4_0(raw: Raw) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 18)
    d = _half(blocks, 0)
    return Blocks(Kind.Q4, _nibbles(blocks[..., 2:]).reshape(len(raw), -1), d, d * np.float16(-8))


def _q4_1(raw: Raw) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 20)
    q = _nibbles(blocks[..., 4:]).reshape(len(raw), -1)
    return Blocks(Kind.Q4, q, _half(blocks, 0), _half(blocks, 2))


def _q8_0(raw: Raw) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 34)
    return Blocks(Kind.Q8, np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(raw), -1), _half(blocks, 0))


def _q4_k(raw: Raw) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 144)
    low, high, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6) << 4], axis=-1)
    q = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    n, d, m = len(raw), _half(blocks, 0), -_half(blocks, 2)
    return Blocks(Kind.Q4_K, q.reshape(n, -1), d, m, scales.reshape(n, -1), minima.reshape(n, -1))


def _q6_k(raw: Raw) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 210)
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    bits = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    high = np.concatenate([bits >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    q = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Blocks(Kind.Q6_K, q.reshape(len(raw), -1), _half(blocks, 208), scales=scales.reshape(len(raw), -1))


_READERS: dict[str, Callable[[Raw], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
