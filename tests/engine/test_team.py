"""The team: nobody passes a barrier early, every item is taken once, also with more threads than cores."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from numba import njit  # noqa: E402

from biphase.engine.kernels.team import (  # noqa: E402
    Seat,
    barrier,
    members_at_once,
    new_team,
    next_item,
    next_of_part,
)

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


def test_all_members_of_this_pool_run_at_once():
    assert [members_at_once(threads) for threads in range(1, numba.get_num_threads() + 1)] == list(
        range(1, numba.get_num_threads() + 1)
    )


@pytest.mark.parametrize(
    ("settings", "members"),
    [
        ({"OMP_THREAD_LIMIT": "1"}, 1),
        ({"OMP_THREAD_LIMIT": "2"}, 2),
        ({"NUMBA_THREADING_LAYER": "workqueue"}, 3),
        *(({"NUMBA_THREADING_LAYER": layer}, 3) for layer in ("tbb", "TBB", "threadsafe")),
    ],
    ids=str,
)
def test_a_pool_with_fewer_threads_than_asked_is_seen_before_a_program_waits_for_ever(settings, members):
    """With three threads whatever the cores; TBB, which need not run all at once, is not taken."""
    others = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "NUMBA_"))}
    code = "from biphase.engine.kernels.team import members_at_once; print(members_at_once(3))"
    environment = others | {"NUMBA_NUM_THREADS": "3"} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{members}\n"
