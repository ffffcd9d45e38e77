"""Weights in panels: one format for both phases, made once at load from the file's own blocks.

A panel holds 16 output rows of a matrix [out, in] over the whole inner dimension, with the rows as the lanes of a
vector: a product needs no sum across lanes, and the same panel serves one row of activations and two thousand. A kind
is the content of one block format, transposed without loss; ``step`` at the end of every panel is the unit of each
row in which the many-row kernels take the weights as 16-bit integers: max |w| / 32512, or a little more where the
scale of a group in units would leave the 16 bits in which it is multiplied (``LARGEST_SCALE``).

| kind | inner elements together | bytes | holds |
|------|-----------|-------|-------------------------------------------------------------|
| Q4   | 32        | 320   | 4 x 16 lanes x 4 bytes of nibbles, d and m in float16: Q4_0, Q4_1 |
| Q4_K | 256       | 2,368 | 8 x the nibbles of 32; of each 32 a scale, then a minimum, in bytes; d and m in float16 |
| Q8   | 32        | 544   | 8 x 16 lanes x 4 bytes (q + 128), d in float16: Q8_0 |
| Q6_K | 256       | 3,392 | 8 x the nibbles and upper 2 bits of 32; of each 16 a scale in a byte; d in float32 |
| INT8 | all       | 16 K + 64 | as Q8 with one d a row in float32: requantised, lossy |
| BF16 | 2         | 64    | 16 lanes x 2 bfloat16 |
| F16, F32 | 1     | 32, 64 | 16 lanes |

A nibble's byte holds elements i (low) and i + 16 (high) of its group of 32, as GGUF has them. A byte of the upper two
bits of q + 32 in Q6_K holds elements i, i + 4, i + 8 and i + 12 of 16, from its lowest bits up. What Q4_K and Q6_K
share among 256 elements stays so, 4.6 and 6.6 bits a weight in all: a decode step takes as long as its bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from biphase.engine.kernels.vectors import LANES

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

HALF_WORD = 32512
"""The largest 16-bit weight or activation: 127 * 256, so that its upper word, rounded, fits a signed byte."""


class Kind(IntEnum):
    """The format of a panel; values are what compiled kernels branch on."""

    Q4 = 0
    Q4_K = 1
    Q8 = 2
    Q6_K = 3
    INT8 = 4
    BF16 = 5
    F16 = 6
    F32 = 7


LARGEST_SCALE = {
    kind: np.float32(scale)
    for kind, scale in ((Kind.Q4, 4095), (Kind.Q4_K, 4095), (Kind.Q8, 255), (Kind.Q6_K, 1023), (Kind.INT8, 255))
}
"""The largest d in units of a row: times 16 (4-bit kinds, unsigned) or 2**(bits of q - 1) it fits 16 bits."""


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """A matrix [rows, inner] as ``data`` [panels, bytes of a panel]; the last panel's missing rows are zeros."""

    kind: Kind
    rows: int
    inner: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix [rows, inner] as numbers: w = d q + m with one ``d`` and ``m`` a block of columns.

    ``q`` is uint8 [rows, inner] (0 to 15) for the 4-bit kinds and int8 for the others; ``d`` is [rows, blocks] in the
    file's precision, ``m`` likewise or None. Where blocks have groups, ``scales`` and ``minima`` [rows, groups] are the
    integers by which their d and m are multiplied.
    """

    kind: Kind
    q: NDArray[np.uint8] | NDArray[np.int8]
    d: NDArray[np.float16] | Floats
    m: NDArray[np.float16] | Floats | None = None
    scales: NDArray[np.uint8] | NDArray[np.int8] | None = None
    minima: NDArray[np.uint8] | None = None

    def dequantized(self) -> Floats:
        """float32 [rows, inner]."""
        rows, inner = self.q.shape
        d, m = self._of_groups()
        groups = self.q.reshape(*d.shape, -1).astype(np.float32)
        groups *= d[:, :, None]
        groups += m[:, :, None]
        return groups.reshape(rows, inner)

    def in_order(self, rows: NDArray[np.int64]) -> "Blocks":
        """The same rows in another order."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in ("q", "d", "m", "scales", "minima")}
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})

    def steps(self) -> Floats:
        """The unit of each row [rows]."""
        scales = np.abs(self._of_groups()[0]).max(-1)
        steps: Floats = np.maximum(self.largest() / np.float32(HALF_WORD), scales / LARGEST_SCALE[self.kind])
        return steps

    def largest(self) -> Floats:
        """max |w| of each row."""
        d, m = self._of_groups()
        q = self.q.reshape(*d.shape, -1)
        low, high = q.min(-1).astype(np.float32), q.max(-1).astype(np.float32)
        largest: Floats = np.maximum(np.abs(d * low + m), np.abs(d * high + m)).max(-1)
        return largest

    def _of_groups(self) -> tuple[Floats, Floats]:
        """d and m of each group [rows, groups] in float32."""
        d = _times(self.d, self.scales)
        return d, np.zeros_like(d) if self.m is None else _times(self.m, self.minima)


def _times(of_blocks: NDArray[np.float16] | Floats, integers: NDArray[np.integer] | None) -> Floats:
    """What blocks share, in float32, times the integers of their groups."""
    values = of_blocks.astype(np.float32)
    if integers is None:
        return values
    of_groups: Floats = values[:, :, None] * integers.reshape(*values.shape, -1).astype(np.float32)
    return of_groups.reshape(len(values), -1)


def pack_blocks(blocks: Blocks) -> PanelMatrix:
    """Transpose a quantised matrix into panels; ``inner`` must be a multiple of 32."""
    inner, count = blocks.q.shape[1], blocks.d.shape[1]
    d = blocks.d.astype(np.float32) if blocks.kind is Kind.Q6_K else blocks.d
    scales = [_lanes(scale) for scale in (blocks.scales, blocks.minima, d, blocks.m) if scale is not None]
    parts = [_bytes(part, count) for part in (_PACKED.get(blocks.kind, _pack_bytes)(blocks), *scales)]
    body = np.concatenate(parts, axis=2).reshape(len(parts[0]), -1)
    return PanelMatrix(blocks.kind, len(blocks.q), inner, _with_steps(body, blocks.steps()))


def _pack_bytes(blocks: Blocks) -> Bytes:
    """q + 128 as [panels, blocks, bytes]."""
    q = _padded(blocks.q).view(np.uint8) ^ np.uint8(0x80)
    return _in_vectors(q.reshape(len(q) // LANES, LANES, blocks.d.shape[1], -1))


def _pack_nibbles(blocks: Blocks) -> Bytes:
    """q as [panels, groups of 32, 256 bytes]."""
    return _in_vectors(_nibbles(_halves(blocks.q.view(np.uint8))))


def _pack_six_bits(blocks: Blocks) -> Bytes:
    """q + 32 as [panels, groups of 32, 384 bytes]: their lower 4 bits and their upper 2."""
    halves = _halves((blocks.q + np.int8(32)).view(np.uint8))
    quads = (halves >> np.uint8(4)).reshape(*halves.shape[:-1], 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper = np.bitwise_or.reduce(quads, axis=-2)
    parts = _in_vectors(_nibbles(halves & np.uint8(15))), _in_vectors(upper.reshape(*halves.shape[:3], 8))
    return np.concatenate(parts, axis=2)


_PACKED: dict[Kind, Callable[[Blocks], Bytes]] = {
    Kind.Q4: _pack_nibbles,
    Kind.Q4_K: _pack_nibbles,
    Kind.Q6_K: _pack_six_bits,
}


def _halves(q: Bytes) -> Bytes:
    """[panels, lanes, groups of 32, 2, 16]."""
    padded: Bytes = _padded(q).view(np.uint8)
    return padded.reshape(len(padded) // LANES, LANES, -1, 2, 16)


def _nibbles(halves: Bytes) -> Bytes:
    """The first 16 elements of a group in the lower nibbles, the others in the upper ones."""
    return halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)


def _in_vectors(by_lane: Bytes) -> Bytes:
    """Bytes [panels, lanes, groups, n] as vectors of 4 bytes a lane: [panels, groups, lanes n]."""
    dwords = np.ascontiguousarray(by_lane).view(np.uint32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(dwords).reshape(*dwords.shape[:2], -1).view(np.uint8)


def pack_values(values: NDArray[np.float32 | np.float16 | np.uint16], kind: Kind) -> PanelMatrix:
    """Transpose a matrix of floats into panels; bfloat16 comes as its bits in uint16."""
    if kind is Kind.BF16:
        largest = np.abs((values.astype(np.uint32) << 16).view(np.float32)).max(-1)
    else:
        largest = np.abs(values.astype(np.float32)).max(-1)
    rows, inner = values.shape
    together = 2 if kind is Kind.BF16 else 1
    padded = _padded(np.pad(values, ((0, 0), (0, inner % together))))
    body = padded.reshape(len(padded) // LANES, LANES, -1, together).transpose(0, 2, 1, 3)
    packed = np.ascontiguousarray(body).reshape(len(body), -1).view(np.uint8)
    return PanelMatrix(kind, rows, inner, _with_steps(packed, largest / np.float32(HALF_WORD)))


def quantize_rows(values: Floats) -> PanelMatrix:
    """int8 with one scale a row (max |w| / 127): half the bytes of bfloat16, and lossy."""
    rows, inner = values.shape
    d = np.maximum(np.abs(values).max(-1), np.finfo(np.float32).tiny) / np.float32(127)
    q = np.zeros((rows, -(-inner // 32) * 32), dtype=np.int8)
    q[:, :inner] = np.rint(values / d[:, None])
    packed = pack_blocks(Blocks(Kind.INT8, q, d[:, None]))
    return PanelMatrix(Kind.INT8, rows, inner, packed.data)


def _padded(matrix: NDArray[np.generic]) -> NDArray[np.generic]:
    missing = -len(matrix) % LANES
    return np.pad(matrix, ((0, missing), (0, 0))) if missing else matrix


def _lanes(scale: NDArray[np.generic]) -> NDArray[np.generic]:
    """[rows, groups] to [panels, groups, lanes]."""
    return _padded(scale).reshape(-1, LANES, scale.shape[1]).transpose(0, 2, 1)


def _bytes(array: NDArray[np.generic], blocks: int) -> Bytes:
    return np.ascontiguousarray(array).reshape(len(array), blocks, -1).view(np.uint8)


def _with_steps(body: Bytes, steps: Floats) -> Bytes:
    by_panel = _padded(steps[:, None]).reshape(len(body), LANES)
    return np.concatenate([body, np.ascontiguousarray(by_panel, dtype=np.float32).view(np.uint8)], axis=1)
