"""Pages of the cache: which are touched, in which order, and that nothing in them changes."""

import numpy as np
import pytest

from biphase.engine.first_touch import HUGE_PAGE, FirstTouch

LAYERS, BLOCKS, ELEMENTS = 3, 3072, 1024
"""Of two caches: a layer is 6 MB, three huge pages or parts of four, all layers reaching theirs at the same block."""
ON_A_PAGE = 1024
"""Blocks of a layer; with all layers of both caches a page is full after a sixth of them, 2,730 rows."""


@pytest.fixture
def caches():
    return [np.arange(LAYERS * BLOCKS * ELEMENTS, dtype=np.uint16).reshape(LAYERS, BLOCKS, ELEMENTS) for _ in range(2)]


def pages_below(cache, block):
    """Brute force: huge pages that hold a byte of blocks 0 to ``block`` of any layer."""
    found = set()
    for layer in range(LAYERS):
        begin = cache[layer].ctypes.data
        end = begin + min(block + 1, BLOCKS) * cache[0, 0].nbytes
        found |= set(range(begin // HUGE_PAGE, (end - 1) // HUGE_PAGE + 1))
    return found


@pytest.mark.parametrize("block", [0, 100, 900, 1024, 2000, 3071])
def test_every_page_is_touched_before_a_block_on_it_is_used(caches, block):
    touch = FirstTouch(caches)
    touched = 0
    while more := touch.advance(block, 64):
        assert more == 1
        touched += more
    assert touched == sum(len(pages_below(cache, block + ON_A_PAGE)) for cache in caches)


@pytest.mark.parametrize("rows", [1, 54, 2729, 2730, 2731, 6000])
def test_steps_of_any_rows_never_meet_a_page_that_is_not_there(caches, rows):
    touch, there = FirstTouch(caches), 0
    while more := touch.advance(0, 1):  # the engine has run before it serves
        there += more
    for used in range(0, 16 * BLOCKS, rows):
        last = min(used + rows, 16 * BLOCKS) - 1
        there += touch.advance(last // 16, rows)
        assert there >= sum(len(pages_below(cache, last // 16)) for cache in caches)


def test_a_step_waits_for_few_pages_and_what_is_there_stays(caches):
    touch, before = FirstTouch(caches), [cache.copy() for cache in caches]
    assert touch.advance(BLOCKS, 1) == 1
    assert touch.advance(BLOCKS, 2 * 2730) == 3
    while touch.advance(BLOCKS, 1000):
        pass
    for cache, kept in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, kept)
