"""Attention by products of int8 against the same quantisation in numpy, and against attention by its definition."""

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.engine.compiled import CompiledModel, PagedCache
from biphase.engine.config import ModelConfig
from biphase.engine.kernels.chunks import Heads
from biphase.engine.kernels.int8_attention import takes_int8
from biphase.engine.packing import pack
from biphase.engine.rows import PrefillChunk, Rows
from biphase.engine.safetensors_files import RandomSource
from tests.engine.forms import inside_a_form, run_tests_in
from tests.engine.test_flash import expected, run, sequence


def quantized(x: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers of float32 rows up to ``steps``, and the scale of each."""
    largest = np.abs(x).max(-1, keepdims=True)
    scale = largest / np.float32(steps)
    return np.rint(x * (np.float32(steps) / np.maximum(largest, np.float32(1e-36)))), scale[..., 0]


def by_bytes(shape: Heads, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Scores of 16-bit queries and keys; of each 64 keys weights in 255ths of the largest: [length, H, D]."""
    group, length = shape.heads // shape.kv_heads, len(q)
    parts = (quantized(x.astype(np.float32), steps) for x, steps in ((q, 32512), (k, 32512), (v, 127)))
    (q, of_q), (k, of_k), (v, of_v) = parts
    k, of_k, v, of_v = (np.repeat(x, group, axis=1).astype(np.float64) for x in (k, of_k, v, of_v))
    out = np.zeros((length, shape.heads, shape.head_dim))
    for head in range(shape.heads):
        scores = (q[:, head] @ k[:, head].T) * np.outer(of_q[:, head], of_k[:, head]) / np.sqrt(shape.head_dim)
        i, j = np.indices(scores.shape)
        scores[(j > i) | ((j <= i - shape.window) if shape.window else False)] = -np.inf
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        for block in range(0, length, 64):
            keys = slice(block, block + 64)
            weights = chances[:, keys] * of_v[keys, head]
            unit = np.maximum(weights.max(-1, keepdims=True), 1e-300) / 255
            out[:, head] += unit * (np.rint(weights / unit) @ v[keys, head])
        out[:, head] /= chances.sum(-1, keepdims=True)
    return out


@settings(max_examples=40, deadline=None)
@given(
    past=st.integers(0, 150),
    rows=st.integers(1, 150),
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 48, 64, 80, 128]),
    window=st.sampled_from([0, 0, 1, 5, 40, 64, 100]),
    threads=st.sampled_from([1, 2, 64]),
    seed=st.integers(0, 99),
)
def test_equals_the_quantised_numbers_in_numpy(past, rows, group, kv_heads, dim, window, threads, seed):
    """A weight at the border of two 255ths may fall either way."""
    shape = Heads(group * kv_heads, kv_heads, dim, window, int8_products=1)
    q, k, v, table, k_pages, v_pages = sequence(np.random.default_rng(seed), past + rows, shape)
    out = run(shape, q, past, table, k_pages, v_pages, threads)
    want = by_bytes(shape, q, k, v)[past:]
    assert np.abs(out - want).max() <= 6e-3 * np.abs(want).max()


@pytest.mark.parametrize("outlier", [0, 20, 150])
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (8, 80), (1, 256)])
def test_is_near_attention_by_its_definition(group, dim, outlier):
    """Also where one channel of all keys lies far from 0, as in Qwen2, whose keys have a bias.

    A value's error is 1 in 254 of its largest number, uniform: 0.3 % of its numbers' deviation if that is 2.7 of them,
    and a weight's likewise; over some keys they average out less than the values themselves do.
    """
    shape = Heads(2 * group, 2, dim, 0, int8_products=1)
    q, k, v, table, k_pages, v_pages = sequence(np.random.default_rng(1), 300, shape)
    k[..., 5] += np.float16(outlier)
    k_pages[:, :, 5] += np.float16(outlier)
    out, want = run(shape, q, 0, table, k_pages, v_pages), expected(shape, q, k, v)
    assert np.sqrt(np.square(out - want).mean()) <= 0.015 * np.sqrt(np.square(want).mean())


def test_keys_and_values_of_zeros():
    shape = Heads(2, 1, 16, 0, int8_products=1)
    q, _, _, table, k_pages, v_pages = sequence(np.random.default_rng(3), 40, shape)
    k_pages[:], v_pages[:] = 0, 0
    assert not run(shape, q, 0, table, k_pages, v_pages).any()


@pytest.mark.skipif(not takes_int8(1), reason="attention of this processor's prompts is not taken in int8")
@pytest.mark.parametrize("rest", [1, 2, 9, 15])
def test_the_end_of_a_prompt_behind_a_prefix_hit_is_what_it_is_cold(rest: int) -> None:
    """Bit by bit, though so few rows would otherwise run the few-row program."""
    config = ModelConfig("llama", 32, 48, 2, 4, 2, 16, 40, 64, 1e-5, 1e4)
    model = CompiledModel(config, pack(config, RandomSource(config, "random")), PagedCache(config, 8), 1)
    tokens = np.random.default_rng(rest).integers(0, 40, 32 + rest)
    model.crossover = 17

    def prefill(first: int, last: int, blocks: np.ndarray) -> np.ndarray:
        at = np.arange(first, last)
        slots = blocks[at // 16] * 16 + at % 16
        return model.prefill(
            Rows(tokens[first:last], at, slots), [PrefillChunk(0, last - first, first, blocks, samples=True)]
        )

    cold = prefill(0, len(tokens), np.array([3, 1, 2]))
    prefill(0, 32, np.array([5, 4, 6]))
    np.testing.assert_array_equal(prefill(32, len(tokens), np.array([5, 4, 6])), cold)


@pytest.mark.forms
@pytest.mark.skipif(inside_a_form, reason="already inside another form")
@pytest.mark.parametrize("form", ["portable", "VNNI"])
def test_other_forms(form, tmp_path):
    run_tests_in(form, __file__, tmp_path)
