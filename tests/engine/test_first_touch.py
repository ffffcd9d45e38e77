"""Pages of the cache: which are touched, how many a step, and that nothing in them changes."""

import numpy as np
import pytest

from biphase.engine.first_touch import HUGE_PAGE, FirstTouch

LAYERS, BLOCKS, ELEMENTS = 3, 3072, 1024
"""Of two caches: a block of a layer is 2 KB, a layer three huge pages, all layers reaching theirs at the same block."""
ON_A_PAGE = 1024
"""Blocks of a layer; with all layers of both caches 170 2/3 blocks fill a page."""


@pytest.fixture(params=[1024, 700, 100], ids="first page ends after block {}".format)
def caches(request):
    """As the allocator may place them."""
    found = []
    for _ in range(2):
        memory = np.zeros(LAYERS * BLOCKS * ELEMENTS * 2 + 2 * HUGE_PAGE, np.uint8)
        start = -memory.ctypes.data % HUGE_PAGE + HUGE_PAGE - 2 * ELEMENTS * request.param
        cache = memory[start:][: LAYERS * BLOCKS * ELEMENTS * 2].view(np.uint16).reshape(LAYERS, BLOCKS, ELEMENTS)
        cache[:] = np.arange(cache.size, dtype=np.uint16).reshape(cache.shape)
        found.append(cache)
    return found


def pages_below(caches, block):
    """Brute force: how many huge pages hold a byte of blocks 0 to ``block`` of any layer."""
    count = 0
    for cache in caches:
        found = set()
        for layer in range(LAYERS):
            begin = cache[layer].ctypes.data
            end = begin + min(block + 1, BLOCKS) * cache[0, 0].nbytes
            found |= set(range(begin // HUGE_PAGE, (end - 1) // HUGE_PAGE + 1))
        count += len(found)
    return count


@pytest.mark.parametrize("blocks", [1, 3, 8, 170, 400, 3071])
def test_steps_of_any_size_never_meet_a_page_that_is_not_there(caches, blocks):
    touch, there = FirstTouch(caches), 0
    for last in range(0, BLOCKS, blocks):
        there += touch.advance(last)
        assert pages_below(caches, last) <= there <= pages_below(caches, last + ON_A_PAGE)


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_no_step_waits_for_all_layers(caches, blocks):
    """By the pace of two pages for each that its blocks fill, with one begun before; the engine's first step aside."""
    touch = FirstTouch(caches)
    touch.advance(0)
    touched = [touch.advance(last) for last in range(blocks, BLOCKS, blocks)]
    assert max(touched) <= 1 + -(-2 * blocks // 171)


def test_a_step_that_opens_a_block_seldom_touches_a_page(caches):
    """Where no page is near: at most one in 85. In most of its steps a sequence that decodes opens no block at all."""
    touch = FirstTouch(caches)
    for last in range(1024):
        touch.advance(last)
    assert 0 < sum(touch.advance(last) for last in range(1024, 1024 + 256)) <= 4


def test_what_is_used_again_touches_nothing(caches):
    touch = FirstTouch(caches)
    for last in range(1500):
        touch.advance(last)
    assert [touch.advance(block) for block in (1499, 0, 300, 1499)] == [0] * 4


def test_what_is_there_stays(caches):
    touch, before = FirstTouch(caches), [cache.copy() for cache in caches]
    for last in range(0, BLOCKS, 7):
        touch.advance(last)
    for cache, kept in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, kept)
