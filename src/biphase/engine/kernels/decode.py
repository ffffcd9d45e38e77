"""Attention of one query row per sequence, compiled: walks the block tables, copies nothing.

A step's work is cut into items (sequence, KV head, split of the keys), so that one long sequence uses every thread;
each item runs an online softmax over its keys and the splits are merged by their maxima and sums. Dao et al. 2023,
Flash-Decoding for long-context inference.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange
from torch import Tensor

from biphase.engine.kernels.arrays import as_array
from biphase.engine.kernels.scalars import exp, narrow, widen

# No nnan and no ninf: a NaN must survive to the sampler, which fails that request alone.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
MIN_KEYS_PER_SPLIT = 128
"""Below this, starting and merging a split costs more than the other thread saves (a few microseconds)."""
FEW_KEYS = 512
"""Up to here (KV heads x keys of all sequences) this thread does it alone, in the time that another takes to wake."""


def decode_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """As ``reference.decode_attention``."""
    rows, (_, kv_heads, _, dim) = len(qkv), k_cache.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    splits = _num_splits(rows * kv_heads, int(lengths.max()))
    partial = np.empty((rows, heads, splits, dim + 2), dtype=np.float32)
    out = torch.empty(rows, heads * dim, dtype=qkv.dtype)
    keys = int(lengths.sum()) * kv_heads
    kernel = _attend_here if keys <= FEW_KEYS else _attend_parallel
    kernel(
        as_array(qkv), as_array(k_cache), as_array(v_cache), tables.numpy(), lengths.numpy(), np.float32(scale), partial
    )
    _merge(partial, as_array(out))
    return out


def _num_splits(items: int, longest: int) -> int:
    wanted = -(-2 * int(get_num_threads()) // items)
    return max(1, min(wanted, longest // MIN_KEYS_PER_SPLIT))


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _attend_here(qkv: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any, partial: Any) -> None:
    for item in range(partial.shape[0] * k.shape[1] * partial.shape[2]):
        _attend_item(item, qkv, k, v, tables, lengths, scale, partial)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _attend_parallel(qkv: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any, partial: Any) -> None:
    for item in prange(partial.shape[0] * k.shape[1] * partial.shape[2]):
        _attend_item(item, qkv, k, v, tables, lengths, scale, partial)


@njit(inline="always")
def _attend_item(item: Any, qkv: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any, partial: Any) -> None:
    """Item = (sequence, KV head, split), the split innermost."""
    kv_heads, dim = k.shape[1], k.shape[3]
    splits = partial.shape[2]
    group = partial.shape[1] // kv_heads
    row, kv_head, split = item // (kv_heads * splits), item // splits % kv_heads, item % splits
    state = partial[row, kv_head * group : (kv_head + 1) * group, split]
    queries = np.empty((group, dim), dtype=np.float32)
    for g in range(group):
        for d in range(dim):
            queries[g, d] = widen(qkv[row, (kv_head * group + g) * dim + d]) * scale
    _attend_split(queries, k, v, kv_head, tables[row], lengths[row], split, splits, state)


@njit(inline="always")
def _attend_split(
    queries: Any, k_cache: Any, v_cache: Any, kv_head: Any, table: Any, length: Any, split: Any, splits: Any, state: Any
) -> None:
    """Online softmax over one split's blocks; ``state`` [group, D + 2] ends as the weighted sum of v, max and sum."""
    block_size, dim = k_cache.shape[2], k_cache.shape[3]
    blocks = (length + block_size - 1) // block_size
    first, last = blocks * split // splits, blocks * (split + 1) // splits
    scores = np.empty(block_size, dtype=np.float32)
    state[:, :dim] = 0
    state[:, dim] = -np.inf
    state[:, dim + 1] = 0
    for index in range(first, last):
        count = min(block_size, length - index * block_size)
        keys, values = k_cache[table[index], kv_head], v_cache[table[index], kv_head]
        for g in range(len(queries)):
            _attend_block(queries[g], keys, values, count, scores, state[g])


@njit(inline="always")
def _attend_block(query: Any, keys: Any, values: Any, count: Any, scores: Any, state: Any) -> None:
    dim = len(query)
    highest = state[dim]
    for t in range(count):
        score = np.float32(0)
        for d in range(dim):
            score += query[d] * widen(keys[t, d])
        scores[t] = score
        highest = max(highest, score)
    # The first block has nothing to rescale: its sums are 0 and exp(-inf - highest) is 0.
    rescale = exp(state[dim] - highest)
    for d in range(dim + 2):
        state[d] *= rescale
    state[dim] = highest
    for t in range(count):
        weight = exp(scores[t] - highest)
        state[dim + 1] += weight
        for d in range(dim):
            state[d] += weight * widen(values[t, d])


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _merge(partial: Any, out: Any) -> None:
    rows, heads, splits, width = partial.shape
    dim = width - 2
    for row in range(rows):
        for head in range(heads):
            highest = partial[row, head, :, dim].max()
            total = np.float32(0)
            for split in range(splits):
                factor = exp(partial[row, head, split, dim] - highest)
                partial[row, head, split, dim] = factor
                total += factor * partial[row, head, split, dim + 1]
            for d in range(dim):
                value = np.float32(0)
                for split in range(splits):
                    value += partial[row, head, split, dim] * partial[row, head, split, d]
                out[row, head * dim + d] = narrow(value / total, out)
