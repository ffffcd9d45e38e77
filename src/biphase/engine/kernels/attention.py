"""Attention of many query rows (a chunk of prefill), through torch's flash kernel for the CPU."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def prefill_attention(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, past: int, scale: float) -> Tensor:
    """Causal attention of one sequence's chunk ``qkv`` [n, (H + 2G) D] (rotated, queries first) after ``past`` tokens.

    The chunk's own k and v are in ``qkv``; those of the past are gathered once through ``blocks`` from the cache
    [blocks, G, block size, D]. Returns [n, H D].
    """
    n, (_, kv_heads, _, dim) = len(qkv), k_cache.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = torch.split(qkv.view(n, -1, dim).transpose(0, 1), [heads, kv_heads, kv_heads])
    if past:
        k = torch.cat((_gather(k_cache, blocks, past), k), dim=1)
        v = torch.cat((_gather(v_cache, blocks, past), v), dim=1)
    # is_causal alone would align the mask to the first key; a chunk after a past needs it aligned to the last.
    mask = causal_mask(n, past, qkv.dtype) if past and n > 1 else None
    out = scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=past == 0, scale=scale, enable_gqa=heads != kv_heads
    )
    return out[0].transpose(0, 1).reshape(n, heads * dim)


def causal_mask(n: int, past: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [n, past + n]: row i sees the past and the chunk up to itself."""
    return torch.full((n, past + n), float("-inf"), dtype=dtype).triu(past + 1)


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of a sequence: [G, length, D]."""
    num_blocks, kv_heads, block_size, dim = cache.shape
    used = blocks[: -(-length // block_size)].long()
    index = used[None, :] * kv_heads + torch.arange(kv_heads)[:, None]
    flat = cache.view(num_blocks * kv_heads, block_size * dim).index_select(0, index.flatten())
    return flat.view(kv_heads, -1, dim)[:, :length]
