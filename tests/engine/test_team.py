"""The team: nobody passes a barrier early, every item is taken once, also with more threads than cores."""

import threading

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from numba import njit  # noqa: E402

from biphase.engine.kernels.team import Seat, barrier, new_team, next_item, next_of_part  # noqa: E402

PHASES, ITEMS = 300, 50


@njit(nogil=True)
def _member(team, threads, me, at, taken, parts, early):
    seat = Seat(team, threads, me)
    for phase in range(PHASES):
        at[me] = phase
        barrier(team, threads)
        for other in range(threads):
            early[me] += at[other] != phase
        item = next_item(team)
        while item < ITEMS:
            taken[me, phase, item] += 1
            item = next_item(team)
        barrier(team, threads)
        count = phase % ITEMS
        item = next_of_part(seat, count)
        while item < count:
            parts[me, phase, item] += 1
            item = next_of_part(seat, count)
        barrier(team, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 65])
def test_members_meet_and_share_items(threads):
    team = new_team(threads)
    at, early = np.zeros(threads, np.int64), np.zeros(threads, np.int64)
    taken, parts = (np.zeros((threads, PHASES, ITEMS), np.int64) for _ in range(2))
    members = [
        threading.Thread(target=_member, args=(team.ctypes.data, threads, me, at, taken, parts, early))
        for me in range(threads)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert not early.any()
    np.testing.assert_array_equal(taken.sum(axis=0), 1)
    for phase, items in enumerate(parts.sum(axis=0)):
        np.testing.assert_array_equal(items, np.arange(ITEMS) < phase % ITEMS)
