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
    length_array = lengths.numpy()
    splits = _num_splits(rows * kv_heads, int(length_array.max()))
    partial = np.empty((rows * kv_heads * splits, heads // kv_heads, dim + 2), dtype=np.float32)
    out = torch.empty(rows, heads * dim, dtype=qkv.dtype)
    keys = int(length_array.sum()) * kv_heads
    kernel = _attend_here if keys <= FEW_KEYS else _attend_parallel
    kernel(
        as_array(qkv), as_array(k_cache), as_array(v_cache), tables.numpy(), length_array, np.float32(scale), partial
    )
    _merge(partial, splits, as_array(out))
    return out


def _num_splits(items: int, longest: int) -> int:
    wanted = -(-2 * int(get_num_threads()) // items)
    return max(1, min(wanted, longest // MIN_KEYS_PER_SPLIT))


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _attend_here(qkv: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any, partial: Any) -> None:
    for item in range(len(partial)):
        _attend_item(item, qkv, k, v, tables, lengths, scale, partial)


@njit(parallel=True, nogil=True, fastmath=FASTMATH, cache=True)
def _attend_parallel(qkv: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any, partial: Any) -> None:
    for item in prange(len(partial)):
        _attend_item(item, qkv, k, v, tables, lengths, scale, partial)


@njit(inline="always")
def _attend_item(item: Any, qkv: Any, k: Any, v: Any, tables: Any, lengths: Any, scale: Any, partial: Any) -> None:
    """Item = (sequence, KV head, split), the split innermost."""
    dim, group = k.shape[3], partial.shape[1]
    splits = len(partial) // (len(qkv) * k.shape[1])
    row, kv_head, split = item // (k.shape[1] * splits), item // splits % k.shape[1], item % splits
    queries = np.empty((group, dim), dtype=np.float32)
    for g in range(group):
        for d in range(dim):
            queries[g, d] = widen(qkv[row, (kv_head * group + g) * dim + d]) * scale
    _attend_split(queries, k, v, kv_head, tables[row], lengths[row], split, splits, partial[item])


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


# Every array below is contiguous in its type (partial[item], k[block, head]): through a strided one the same loops are
# scalar code, three times slower.


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _attend_block(query: Any, keys: Any, values: Any, count: Any, scores: Any, state: Any) -> None:
    dim = len(query)
    _score(query, keys, count, scores)
    highest = state[dim]
    for t in range(count):
        highest = max(highest, scores[t])
    # The first block has nothing to rescale: its sums are 0 and exp(-inf - highest) is next to 0.
    rescale = exp(state[dim] - highest)
    state[dim] = highest
    state[dim + 1] = state[dim + 1] * rescale + _weigh(highest, count, scores)
    _add_values(rescale, scores, values, count, state[:dim])


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _score(query: Any, keys: Any, count: Any, scores: Any) -> None:
    for t in range(count):
        score = np.float32(0)
        for d in range(len(query)):
            score += query[d] * widen(keys[t, d])
        scores[t] = score


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _weigh(highest: Any, count: Any, scores: Any) -> Any:
    """Turn scores into weights in place; their sum."""
    total = np.float32(0)
    for t in range(count):
        scores[t] = exp(scores[t] - highest)
        total += scores[t]
    return total


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _add_values(rescale: Any, weights: Any, values: Any, count: Any, out: Any) -> None:
    for d in range(len(out)):
        out[d] *= rescale
    for t in range(count):
        weight = weights[t]
        for d in range(len(out)):
            out[d] += weight * widen(values[t, d])


@njit(nogil=True, fastmath=FASTMATH, cache=True)
def _merge(partial: Any, splits: Any, out: Any) -> None:
    """Join the splits of each head by their maxima and sums; ``partial`` [items, group, D + 2], splits innermost."""
    items, group, width = partial.shape
    dim = width - 2
    kv_heads = items // (len(out) * splits)
    for item in range(0, items, splits):
        row, first_head = item // (kv_heads * splits), item // splits % kv_heads * group
        parts = partial[item : item + splits]
        for g in range(group):
            highest = parts[:, g, dim].max()
            total = np.float32(0)
            for split in range(splits):
                parts[split, g, dim] = exp(parts[split, g, dim] - highest)
                total += parts[split, g, dim] * parts[split, g, dim + 1]
            for d in range(dim):
                value = np.float32(0)
                for split in range(splits):
                    value += parts[split, g, dim] * parts[split, g, d]
                out[row, (first_head + g) * dim + d] = narrow(value / total, out)
