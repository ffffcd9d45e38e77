"""Every operator of the model in plain torch, with the signature of its compiled twin: the definition of right.

Used where numba is not there, and by the tests as the other side. Shapes: N rows (tokens), h hidden size, H query
heads, G KV heads, D head dimension, I intermediate size; the KV cache of one layer is [blocks, G, block size, D].
"""

import torch
from torch import Tensor


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add ``delta`` to the float32 ``residual`` [N, h] in place and return its RMS norm [N, h] in ``dtype``.

    Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
    """
    if delta is not None:
        residual += delta
    return _rms_norm(residual, weight, eps).to(dtype)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    """Rotate q and k of ``qkv`` [N, (H + 2G) D] in place, after their norm if any, and store k and v in the cache.

    ``cos`` and ``sin`` are [positions, D / 2] float32; pairs are (i, i + D/2), the layout of Hugging Face weights.
    ``slots`` [N] is block * block_size + offset of each row. ``norms`` are Qwen3's weights of q and k, [D] float32.
    """
    _, kv_heads, block_size, dim = k_cache.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    rows = qkv.view(len(qkv), -1, dim)
    rotated = rows[:, : heads + kv_heads].float()
    if norms is not None:
        rotated[:, :heads] = _rms_norm(rotated[:, :heads], norms[0], eps)
        rotated[:, heads:] = _rms_norm(rotated[:, heads:], norms[1], eps)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    low, high = rotated.chunk(2, dim=-1)
    rows[:, : heads + kv_heads] = torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(qkv.dtype)
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = rows[:, heads : heads + kv_heads]
    v_cache[blocks, :, offsets] = rows[:, heads + kv_heads :]


def decode_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """One query row per sequence over its ``lengths[n]`` cached tokens, found through its block table ``tables[n]``.

    ``qkv`` [N, (H + 2G) D] holds the queries first; the result is [N, H D] in its dtype.
    """
    _, kv_heads, block_size, dim = k_cache.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty(len(qkv), heads * dim, dtype=qkv.dtype)
    for row, length in enumerate(lengths.tolist()):
        blocks = tables[row, : -(-length // block_size)].long()
        k, v = (cache[blocks].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length] for cache in (k_cache, v_cache))
        q = qkv[row, : heads * dim].view(kv_heads, heads // kv_heads, dim)
        weights = torch.softmax(q.float() @ k.float().transpose(1, 2) * scale, dim=-1)
        out[row] = (weights @ v.float()).flatten().to(out.dtype)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of ``gate_up`` [N, 2I], the gate first: [N, I]. Shazeer 2020, GLU Variants (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
