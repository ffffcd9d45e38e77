"""Pages of the cache: which are touched, in which order, and that nothing in them changes."""

import numpy as np
import pytest

from biphase.engine.first_touch import BLOCKS_AHEAD, HUGE_PAGE, FirstTouch

LAYERS, BLOCKS, ELEMENTS = 3, 3000, 1024
"""Of two caches: a layer is 6 MB, three huge pages or parts of four."""


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


@pytest.mark.parametrize("block", [0, 100, 900, 1024, 2000, 2999])
def test_every_page_is_touched_before_a_block_on_it_is_used(caches, block):
    touch = FirstTouch(caches)
    touched = 0
    while more := touch.advance(block, 64):
        assert more <= 2
        touched += more
    assert touched == sum(len(pages_below(cache, block + BLOCKS_AHEAD)) for cache in caches)


def test_a_step_waits_for_few_pages_and_what_is_there_stays(caches):
    touch, before = FirstTouch(caches), [cache.copy() for cache in caches]
    assert touch.advance(BLOCKS, 1) == 1
    assert touch.advance(BLOCKS, 130) == 3
    while touch.advance(BLOCKS, 1000):
        pass
    for cache, kept in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, kept)
