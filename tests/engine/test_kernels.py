"""Every compiled kernel against its plain reference, and the scalar pieces against numpy and torch."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numba import njit

from biphase.engine.kernels import attention, decode, elementwise, reference
from biphase.engine.kernels.arrays import as_array
from biphase.engine.kernels.linear import Linear
from biphase.engine.kernels.scalars import exp, narrow, widen

DTYPES = [torch.float32, torch.bfloat16]
# float32: sums in another order. bfloat16: one rounding of the result to 8 bits, which may fall on either side.
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}


@njit
def _exp_all(x, out):
    for i in range(len(x)):
        out[i] = exp(x[i])


@njit
def _round_trip(x, out, back):
    for i in range(len(x)):
        out[i] = narrow(x[i], out)
        back[i] = widen(out[i])


def test_exp_is_within_two_parts_in_ten_million_of_numpy() -> None:
    x = np.linspace(-86, 88, 200_001, dtype=np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / exact) < 2e-7
    extremes = np.array([-np.inf, -1000, 0, 88], dtype=np.float32)
    got = np.empty_like(extremes)
    _exp_all(extremes, got)
    assert got[0] < 2e-38
    assert got[1] < 2e-38
    assert got[2] == 1


def test_bfloat16_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    x = np.concatenate(
        [bits.view(np.float32), np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.3895e38], dtype=np.float32)]
    )
    out, back = np.empty(len(x), dtype=np.uint16), np.empty_like(x)
    _round_trip(x, out, back)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(back, expected)  # NaN equals NaN here


def cache_of(lengths: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, seed: int):
    """A paged cache with the sequences' blocks in shuffled places, and their tables."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    k, v = (torch.randn(sum(counts) + 3, kv_heads, block_size, dim, generator=generator).to(dtype) for _ in range(2))
    ids = torch.randperm(len(k), generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
    return k, v, tables


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (2, 4)]),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([1, 16]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_decode_attention(
    lengths: list[int], heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype, seed: int
) -> None:
    kv_heads, group = heads
    k, v, tables = cache_of(lengths, kv_heads, dim, block_size, dtype, seed)
    qkv = torch.randn(len(lengths), (kv_heads * group + 2 * kv_heads) * dim).to(dtype)
    arguments = (qkv, k, v, tables, torch.tensor(lengths, dtype=torch.int32), dim**-0.5)
    got, expected = decode.decode_attention(*arguments), reference.decode_attention(*arguments)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


def test_decode_attention_with_huge_scores_stays_finite() -> None:
    k, v, tables = cache_of([300], 1, 8, 16, torch.float32, 0)
    qkv = torch.full((1, 24), 1e4)
    arguments = (qkv, k * 1e4, v, tables, torch.tensor([300], dtype=torch.int32), 1.0)
    got = decode.decode_attention(*arguments)
    torch.testing.assert_close(got, reference.decode_attention(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("past", "n"), [(0, 1), (0, 37), (16, 1), (23, 40), (64, 64)])
def test_prefill_attention_is_softmax_over_past_and_self(dtype: torch.dtype, past: int, n: int) -> None:
    kv_heads, group, dim = 2, 3, 16
    k, v, tables = cache_of([past + n], kv_heads, dim, 16, dtype, 1)
    qkv = torch.randn(n, (kv_heads * group + 2 * kv_heads) * dim).to(dtype)
    got = attention.prefill_attention(qkv, k, v, tables[0], past, dim**-0.5)
    heads = qkv.view(n, -1, dim).transpose(0, 1).float()
    old_k, old_v = (c[tables[0].long()].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :past].float() for c in (k, v))
    for head in range(kv_heads * group):
        g = head // group
        keys = torch.cat((old_k[g], heads[kv_heads * group + g]))
        values = torch.cat((old_v[g], heads[kv_heads * group + kv_heads + g]))
        for row in range(n):
            seen = past + row + 1
            weights = torch.softmax(keys[:seen] @ heads[head, row] * dim**-0.5, dim=0)
            expected = weights @ values[:seen]
            torch.testing.assert_close(got[row, head * dim : (head + 1) * dim].float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(dtype: torch.dtype, with_delta: bool) -> None:
    residual, weight = torch.randn(5, 48), torch.randn(48)
    delta = torch.randn(5, 48).to(dtype) if with_delta else None
    ours, theirs = residual.clone(), residual.clone()
    got = elementwise.add_rms_norm(ours, delta, weight, 1e-5, dtype)
    expected = reference.add_rms_norm(theirs, delta, weight, 1e-5, dtype)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(ours, theirs)
    hand = (theirs / (theirs.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).to(dtype)
    torch.testing.assert_close(got, hand, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_rope_and_store(dtype: torch.dtype, normed: bool) -> None:
    kv_heads, heads, dim, n, block_size = 2, 6, 16, 7, 4
    qkv = torch.randn(n, (heads + 2 * kv_heads) * dim).to(dtype)
    positions = torch.arange(3, 3 + n)
    angles = torch.arange(20).float()[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    norms = (torch.randn(dim), torch.randn(dim)) if normed else None
    slots = torch.randperm(5 * block_size)[:n]
    results = []
    for module in (elementwise, reference):
        rows = qkv.clone()
        k, v = (torch.zeros(5, kv_heads, block_size, dim, dtype=dtype) for _ in range(2))
        module.rope_and_store(rows, positions, angles.cos(), angles.sin(), norms, 1e-6, k, v, slots)
        results.append((rows, k, v))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    rows, k, _ = results[0]
    block, offset = int(slots[4]) // block_size, int(slots[4]) % block_size
    torch.testing.assert_close(k[block, 1, offset], rows.view(n, -1, dim)[4, heads + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 64) * 10).to(dtype)
    torch.testing.assert_close(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, bias, x = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype), torch.randn(rows, 24).to(dtype)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    got = Linear(weight, bias if biased else None)(x)
    torch.testing.assert_close(got, expected.to(dtype), **TOLERANCE[dtype])


def test_bfloat16_is_seen_without_a_copy() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    as_array(tensor)[1] = 0x3F80
    assert tensor.tolist() == [0, 1, 0, 0]
