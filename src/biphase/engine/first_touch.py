"""Memory of the cache is asked for shortly before it is first used, a little with each step.

The system hands out a large array in huge pages as they are first written, and zeroes each: 2 to 50 ms. All layers
reach the end of theirs at nearly the same block, so that one step would wait for dozens of them: 0.1 to 0.2 s. So the
next page of a layer is wanted as soon as the one before is in use, and pages are touched twice as fast as blocks
come into use: while one sequence decodes, in one step of dozens. Where many are owed at once (a prompt takes its
blocks with its first chunk), a step touches no more than twice what its rows fill, and one. An engine without work
touches them all, so that the first steps after a start find theirs.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from biphase.engine.kernels.cells import BLOCK

HUGE_PAGE = 2 << 20
"""Bytes, on x86-64 and on arm64 with pages of 4 KB; where pages are smaller nothing is gained and little lost."""


_PACE = 2
"""Pages touched for each that comes into use, until the next page of every layer is there."""
_NEAR = 64
"""Blocks before a page is used from which on every step touches one: after a start, when no pace has helped yet."""


class FirstTouch:
    """The huge pages of ``caches`` [layers, blocks, ...] in the order in which rising blocks reach them."""

    def __init__(self, caches: Sequence[NDArray[np.uint8]]) -> None:
        pages = [page for number, cache in enumerate(caches) for page in _pages(number, cache)]
        self._pages = sorted(pages, reverse=True)
        self._flat = [cache.reshape(-1) for cache in caches]
        self._ahead = max(HUGE_PAGE // cache[0, 0].nbytes for cache in caches)
        self._pages_of_a_block = sum(cache.nbytes // cache.shape[1] for cache in caches) / HUGE_PAGE
        self._highest, self._due = -1, 0.0

    def advance(self, block: int, rows: int) -> int:
        """Before a step of ``rows`` rows that uses blocks up to ``block``. Returns how many pages were touched."""
        self._due += _PACE * self._pages_of_a_block * max(block - self._highest, 0)
        self._highest = max(block, self._highest)
        most, touched = 1 + int(_PACE * self._pages_of_a_block * rows / BLOCK), 0
        while touched < most and self._wanted(block):
            self._touch_next()
            self._due -= 1
            touched += 1
        if touched < most:  # nothing is wanted now: no saving up for a burst
            self._due = min(max(self._due, 0.0), 1.0)
        return touched

    def ahead(self) -> bool:
        """Touch one page of those that steps will want, up to a page of each layer; whether there was one."""
        if self._distance(self._highest) > self._ahead:
            return False
        self._touch_next()
        return True

    def _wanted(self, block: int) -> bool:
        """Whether it is time for the next page of all."""
        distance = self._distance(block)
        return distance <= _NEAR or (distance <= self._ahead and self._due >= 1)

    def _distance(self, block: int) -> float:
        """Blocks from this one to the first on the next page."""
        return self._pages[-1][0] - block if self._pages else inf

    def _touch_next(self) -> None:
        _, number, index = self._pages.pop()
        flat = self._flat[number]
        flat[index] = flat[index]  # what is there stays


def _pages(number: int, cache: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """(first block that lies on it, ``number``, index of an element on it) of each page of a cache."""
    layers, blocks = cache.shape[:2]
    layer = cache.nbytes // layers
    second = -cache.ctypes.data % HUGE_PAGE or HUGE_PAGE
    found = []
    for start in (0, *range(second, cache.nbytes, HUGE_PAGE)):
        reached = [start % layer * blocks // layer]
        if start // layer < (min(start + HUGE_PAGE, cache.nbytes) - 1) // layer:
            reached.append(0)  # a later layer begins on it
        found.append((min(reached), number, start // cache.itemsize))
    return found
