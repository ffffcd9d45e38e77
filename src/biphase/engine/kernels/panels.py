"""Weights in panels: one format for both phases, made once at load from the file's own blocks.

A panel holds 16 output rows of a matrix [out, in] over the whole inner dimension, with the rows as the lanes of a
vector: a product needs no sum across lanes, and the same panel serves one row of activations and two thousand. A kind
is the content of one block format, transposed without loss; ``step`` at the end of every panel is the unit of each
row in which the many-row kernels take the weights as 16-bit integers: max |w| / 32512, or a little more where the
scale of a group in units would leave the 16 bits in which it is multiplied (``LARGEST_SCALE``).

| kind | inner elements together | bytes | holds |
|------|-----------|-------|-------------------------------------------------------------|
| Q4   | 32        | 320   | 4 x 16 lanes x 4 bytes of nibbles, d and m in float16: Q4_0, Q4_1 |
| Q4_K | 32        | 384   | the same with d and m in float32: Q4_K |
| Q8   | 32        | 544   | 8 x 16 lanes x 4 bytes (q + 128), d in float16: Q8_0 |
| Q6_K | 16        | 320   | 4 x 16 lanes x 4 bytes (q + 128), d in float32: Q6_K |
| INT8 | all       | 16 K + 64 | as Q8 with one d a row in float32: requantised, lossy |
| BF16 | 2         | 64    | 16 lanes x 2 bfloat16 |
| F16, F32 | 1     | 32, 64 | 16 lanes |

A nibble's byte holds elements i (low) and i + 16 (high) of its group of 32, as GGUF has them.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

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
    """A quantised matrix [rows, inner] as numbers: w = d q + m with one ``d`` and ``m`` a group of columns.

    ``q`` is uint8 [rows, inner] (0 to 15) for the 4-bit kinds and int8 for the others; ``d`` is [rows, groups] in the
    file's precision, ``m`` likewise or None.
    """

    kind: Kind
    q: NDArray[np.uint8] | NDArray[np.int8]
    d: NDArray[np.float16] | Floats
    m: NDArray[np.float16] | Floats | None = None

    def dequantized(self) -> Floats:
        """float32 [rows, inner]."""
        rows, inner = self.q.shape
        groups = self.q.reshape(rows, self.d.shape[1], -1).astype(np.float32)
        groups *= self.d.astype(np.float32)[:, :, None]
        if self.m is not None:
            groups += self.m.astype(np.float32)[:, :, None]
        return groups.reshape(rows, inner)

    def in_order(self, rows: NDArray[np.int64]) -> "Blocks":
        """The same rows in another order."""
        return replace(self, q=self.q[rows], d=self.d[rows], m=None if self.m is None else self.m[rows])

    def steps(self) -> Floats:
        """The unit of each row [rows]."""
        scales = np.abs(self.d.astype(np.float32)).max(-1)
        steps: Floats = np.maximum(self.largest() / np.float32(HALF_WORD), scales / LARGEST_SCALE[self.kind])
        return steps

    def largest(self) -> Floats:
        """max |w| of each row."""
        rows = len(self.q)
        q = self.q.reshape(rows, self.d.shape[1], -1)
        low, high = q.min(-1).astype(np.float32), q.max(-1).astype(np.float32)
        d, m = self.d.astype(np.float32), np.float32(0) if self.m is None else self.m.astype(np.float32)
        largest: Floats = np.maximum(np.abs(d * low + m), np.abs(d * high + m)).max(-1)
        return largest


def pack_blocks(blocks: Blocks) -> PanelMatrix:
    """Transpose a quantised matrix into panels; ``inner`` must be a multiple of 32."""
    q: Bytes = _padded(blocks.q).view(np.uint8)
    groups, inner, panels = blocks.d.shape[1], q.shape[1], len(q) // LANES
    if blocks.kind in (Kind.Q4, Kind.Q4_K):
        halves = q.reshape(panels, LANES, groups, 2, 16)
        q, per_dword = (halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)), 8
    else:
        q, per_dword = q ^ np.uint8(0x80), 4
    dwords = np.ascontiguousarray(q).reshape(panels, LANES, -1).view(np.uint32)
    by_lane = dwords.reshape(panels, LANES, groups, inner // groups // per_dword).transpose(0, 2, 3, 1)
    parts = [_bytes(by_lane, panels, groups)]
    parts += [_bytes(_lanes(scale), panels, groups) for scale in (blocks.d, blocks.m) if scale is not None]
    body = np.concatenate(parts, axis=2).reshape(panels, -1)
    return PanelMatrix(blocks.kind, len(blocks.q), inner, _with_steps(body, blocks.steps()))


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


def _bytes(array: NDArray[np.generic], panels: int, groups: int) -> Bytes:
    return np.ascontiguousarray(array).reshape(panels, groups, -1).view(np.uint8)


def _with_steps(body: Bytes, steps: Floats) -> Bytes:
    by_panel = _padded(steps[:, None]).reshape(len(body), LANES)
    return np.concatenate([body, np.ascontiguousarray(by_panel, dtype=np.float32).view(np.uint8)], axis=1)
