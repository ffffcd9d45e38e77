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


def started(caches):
    """As after the steps with which an engine warms up; with how many pages that touched."""
    touch, there = FirstTouch(caches), 0
    while more := touch.advance(0, 1):
        there += more
    return touch, there


@pytest.mark.parametrize("blocks", [1, 3, 8, 170, 400])
def test_steps_of_any_size_never_meet_a_page_that_is_not_there(caches, blocks):
    touch, there = started(caches)
    if blocks > 8 and pages_below(caches, blocks) > pages_below(caches, 0):
        pytest.skip("the first step crosses the end of the first page: nothing can have helped")
    for last in range(0, BLOCKS, blocks):
        there += touch.advance(last, 16 * blocks)
        assert pages_below(caches, last) <= there <= pages_below(caches, last + ON_A_PAGE)


@pytest.mark.parametrize("blocks", [1, 8, 85, 400])
def test_no_step_waits_for_all_layers(caches, blocks):
    """But for twice what its rows fill, and one; wherever its blocks lie: a prompt has taken a thousand before them."""
    touch, _ = started(caches)
    most = 1 + 2 * blocks // 170
    assert all(touch.advance(last, 16 * blocks) <= most for last in range(0, BLOCKS, blocks))
    touch, _ = started(caches)
    assert all(touch.advance(last, 16 * blocks) <= most for last in (3, 1500, 4, 1501, 5, 6, 7, 1502))


@pytest.mark.parametrize("sequences", [1, 16])
def test_few_steps_of_decode_touch_a_page(caches, sequences):
    """Where no page is near: one for each 85 blocks, whose 1,360 rows come 1 or 16 a step; never two in a step."""
    touch, _ = started(caches)
    for last in range(1024):
        touch.advance(last, 16)
    steps = [1024 + row // 16 * (1 if sequences == 1 else 16) for row in range(256 * 16 // sequences)]
    touched = [touch.advance(block, sequences) for block in steps]
    assert max(touched) == 1
    assert 0 < sum(touched) <= 4


def test_what_is_used_again_touches_nothing(caches):
    touch = FirstTouch(caches)
    for last in range(1500):
        touch.advance(last, 16)
    assert [touch.advance(block, 1) for block in (1499, 0, 300, 1499)] == [0] * 4


def test_an_engine_without_work_touches_what_the_next_steps_would(caches):
    touch, there = FirstTouch(caches), 0
    for last in (0, 700, ON_A_PAGE):
        there += touch.advance(last, 1)
        while touch.ahead():
            there += 1
        assert pages_below(caches, last) <= there <= pages_below(caches, last + ON_A_PAGE)
        assert [touch.advance(block, 1) for block in (last, last + 40, last + 80)] == [0] * 3
    for last in range(BLOCKS):
        touch.advance(last, 16)
    assert not touch.ahead()


def test_what_is_there_stays(caches):
    touch, before = FirstTouch(caches), [cache.copy() for cache in caches]
    for last in range(0, BLOCKS, 7):
        touch.advance(last, 112)
        touch.ahead()
    for cache, kept in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, kept)
