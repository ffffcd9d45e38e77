"""Flash attention over pages against attention by its definition in float64."""

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from biphase.engine.kernels.chunks import TILES, Chunk, Heads, Rows, attention_items, query_tile
from biphase.engine.kernels.flash import attend, attention_scratch_bytes
from biphase.engine.kernels.tiles import configure_tiles, release_tiles, whole_tiles
from tests.engine.forms import inside_a_form, run_tests_in

CONFIG = whole_tiles()


@njit(nogil=True)
def _run(config, k, v, shape, chunk, threads, q, out, scratch):
    if TILES:
        configure_tiles(config)
    tile = query_tile(chunk, shape, threads)
    for item in range(attention_items(chunk, shape, tile)):
        attend(q, shape, chunk, tile, item, k, v, out, scratch)
    if TILES:
        release_tiles()


def sequence(rng, length, shape):
    """q float32 [length, H, D]; k, v float16 [length, G, D]; and a cache that holds them in shuffled pages."""
    q = rng.normal(size=(length, shape.heads, shape.head_dim)).astype(np.float32) * 2
    k, v = (rng.normal(size=(length, shape.kv_heads, shape.head_dim)).astype(np.float16) for _ in range(2))
    used = -(-length // 16)
    table = rng.permutation(used + 3)[:used].astype(np.int32)
    pages = np.full((2, used + 3, shape.kv_heads, 16, shape.head_dim), np.nan, np.float16)  # unwritten is unread
    for token in range(length):
        pages[:, table[token // 16], :, token % 16] = k[token], v[token]
    return q, k, v, table, np.ascontiguousarray(pages[0].swapaxes(2, 3)), pages[1].copy()


def run(shape, q, past, table, k_pages, v_pages, threads=1):
    """Attention of rows ``past`` and on of a sequence, in the items that so many threads get: [rows, H, D]."""
    rows = np.ascontiguousarray(q[past:]).reshape(len(q) - past, -1)
    out = np.full_like(rows, np.nan)
    chunk = Chunk(0, len(rows), past, table.ctypes.data)
    scratch = np.empty(attention_scratch_bytes(shape), np.uint8)
    k, v = k_pages.ctypes.data, v_pages.ctypes.data
    source, target = (Rows(a.ctypes.data, a.strides[0]) for a in (rows, out))
    _run(CONFIG.ctypes.data, k, v, shape, chunk, threads, source, target, scratch.ctypes.data)
    return out.reshape(len(rows), shape.heads, shape.head_dim)


def expected(shape, q, k, v):
    """Softmax of all visible keys in float64: [length, H, D]."""
    group = shape.heads // shape.kv_heads
    k, v = (np.repeat(a.astype(np.float64), group, axis=1) for a in (k, v))
    scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) / np.sqrt(shape.head_dim)
    i, j = np.indices(scores.shape[1:])
    hidden = (j > i) | ((j <= i - shape.window) if shape.window else False)
    scores[:, hidden] = -np.inf
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", chances / chances.sum(-1, keepdims=True), v)


@settings(max_examples=40, deadline=None)
@given(
    past=st.integers(0, 150),
    rows=st.integers(1, 150),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 48, 64, 80, 128]),
    window=st.sampled_from([0, 0, 1, 5, 40, 64, 100]),
    threads=st.sampled_from([1, 2, 7, 64]),
    seed=st.integers(0, 99),
)
def test_equals_attention_by_its_definition(past, rows, group, kv_heads, dim, window, threads, seed):
    shape = Heads(group * kv_heads, kv_heads, dim, window)
    q, k, v, table, k_pages, v_pages = sequence(np.random.default_rng(seed), past + rows, shape)
    out = run(shape, q, past, table, k_pages, v_pages, threads)
    want = expected(shape, q, k, v)[past:]
    assert np.abs(out - want).max() <= 2e-4 * np.abs(want).max()


@pytest.mark.parametrize("int8_products", [0, 1])
@pytest.mark.parametrize(("group", "dim", "window"), [(3, 64, 0), (3, 64, 30), (8, 80, 0), (1, 256, 30)])
def test_a_row_depends_neither_on_where_the_chunk_was_cut_nor_on_later_tokens(group, dim, window, int8_products):
    shape = Heads(2 * group, 2, dim, window, int8_products=int8_products)
    q, _, _, table, k_pages, v_pages = sequence(np.random.default_rng(2), 230, shape)
    whole = run(shape, q, 0, table, k_pages, v_pages)
    for past, end in ((0, 17), (17, 90), (90, 91), (91, 230)):
        for threads in (1, 2, 5):
            chunk = run(shape, q[:end], past, table, k_pages, v_pages, threads)
            np.testing.assert_array_equal(chunk, whole[past:end])


def test_large_scores():
    """A key that outweighs all others by e**80: the maximum moves in every block."""
    shape = Heads(2, 1, 64, 0)
    q, k, v, table, k_pages, v_pages = sequence(np.random.default_rng(4), 200, shape)
    q *= 40
    want = expected(shape, q, k, v)
    assert np.abs(run(shape, q, 0, table, k_pages, v_pages) - want).max() <= 5e-3 * np.abs(want).max()


@pytest.mark.parametrize("int8_products", [0, 1])
@pytest.mark.parametrize("which", ["queries", "keys", "values"])
def test_a_number_that_is_none_spoils_the_rows_that_see_it(which, int8_products):
    shape = Heads(2, 1, 64, 0, int8_products=int8_products)
    q, _, _, table, k_pages, v_pages = sequence(np.random.default_rng(5), 100, shape)
    page, token = table[80 // 16], 80 % 16
    spoilt = {"queries": q[80, 0], "keys": k_pages[page, 0, :, token], "values": v_pages[page, 0, token]}[which]
    spoilt[7] = np.nan
    out = run(shape, q, 0, table, k_pages, v_pages)
    # 0 times a value that is not finite is not 0, so the rows before it in its block of 64 are spoilt as well
    assert np.isfinite(out[: 64 if which == "values" else 80]).all()
    assert np.isnan(out[80, 0]).any()
    if which != "queries":
        assert np.isnan(out[80:]).any(axis=(1, 2)).all()


@pytest.mark.forms
@pytest.mark.skipif(inside_a_form, reason="already inside another form")
@pytest.mark.parametrize("form", ["portable", "VNNI and BF16"])
def test_other_forms(form, tmp_path):
    run_tests_in(form, __file__, tmp_path)


@pytest.mark.parametrize(
    ("rows", "threads", "tile", "vector_tile"),
    [
        (112, 2, 64, 56),  # tiles of 96 and 16 would leave one thread 1.6 times the other's rows
        (80, 2, 48, 40),  # one tile for each of three heads: one thread would do two of them
        (80, 3, 80, 80),
        (2048, 2, 96, 96),
        (512, 64, 32, 8),
        (16, 2, 16, 8),
        (16, 64, 16, 8),
    ],
)
def test_few_items_are_cut_so_that_threads_end_together(rows, threads, tile, vector_tile):
    found = query_tile(Chunk(0, rows, 4000, 0), Heads(9, 3, 64, 0), threads)
    assert min(found, rows) == (tile if TILES else vector_tile)
