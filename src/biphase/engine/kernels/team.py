"""A team: the threads of one parallel region that run a whole program together, phase by phase.

Opening a parallel region costs microseconds and a step has hundreds of phases, so the region is opened once and its
threads meet at a barrier between phases. Inside a phase they take work items from a counter, so that a thread that
the system has put aside delays nobody but at the end of the phase.

All members must run at the same time: a program is started as ``prange(threads)`` with ``threads`` not above
``numba.get_num_threads()``, under a threading layer that gives every iteration its own thread (OpenMP, workqueue). How
many do run at the same time is tried before: ``members_at_once``.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange, types
from numpy.typing import NDArray

from biphase.engine.kernels.vectors import I32, add_atomic, call, get_atomic, operation, pause, put_i64

_ARRIVED, _ROUND, _ITEMS, KERNELS, _PARTS = 0, 128, 256, 384, 512
"""Byte offsets of the counters, from ``_PARTS`` on one a member: 128 apart, as lines are fetched in pairs.
At ``KERNELS`` lie addresses of what members call (``out_of_line``)."""
_ITEMS_OF_A_PART = 8
"""Items a member from which on each has a part of its own: looking for work in those of others takes time."""

_SPINS = 4000
"""Looks at the barrier before a waiting thread offers its core to others: 20 to 200 microseconds."""

_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def _yield_core(b: Any) -> None:
    call(b, _YIELD, I32)


yield_core = operation(types.void, [], _yield_core)
"""Let another thread that waits for this core run."""


class Seat(NamedTuple):
    """A member of a team of ``threads`` at address ``team``."""

    team: int
    threads: int
    member: Any


def new_team(members: int, kernels: Sequence[int] = ()) -> NDArray[np.int64]:
    """The counters of one team of up to ``members``, at rest. They are at rest again after every program.

    ``kernels``: ``out_of_line.addresses()``, for programs that call any.
    """
    assert 8 * len(kernels) <= _PARTS - KERNELS
    team = np.zeros((_PARTS + 128 * members) // 8, dtype=np.int64)
    team[KERNELS // 8 :][: len(kernels)] = kernels
    return team


@njit(nogil=True, cache=True, error_model="numpy")
def barrier(team: Any, threads: Any) -> None:
    """Wait until all ``threads`` members of the team at address ``team`` are here; the items then start again at 0."""
    this_round = get_atomic(team + _ROUND)
    if add_atomic(team + _ARRIVED, 1) == threads - 1:
        put_i64(team + _ARRIVED, 0)
        put_i64(team + _ITEMS, 0)
        for member in range(threads):
            put_i64(team + _PARTS + 128 * member, 0)
        add_atomic(team + _ROUND, 1)
        return
    looks = 0
    while get_atomic(team + _ROUND) == this_round:
        looks += 1
        if looks < _SPINS:
            pause()
        else:
            yield_core()


_PATIENCE = 3_000_000
"""Looks, each of which offers the core to others, before a member that has not come is given up: a second or more."""


def members_at_once(threads: int) -> int:
    """How many of ``threads`` members run at the same time: OMP_THREAD_LIMIT and OMP_DYNAMIC may leave fewer."""
    meeting = np.zeros(2, dtype=np.int64)
    _meet(meeting.ctypes.data, threads, _PATIENCE)
    return int(meeting[1]) or threads


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _meet(meeting: Any, threads: Any, patience: Any) -> None:
    for _ in prange(threads):
        _wait_for_all(meeting, threads, patience)


@njit(nogil=True, cache=True, error_model="numpy")
def _wait_for_all(meeting: Any, threads: Any, patience: Any) -> None:
    """At ``meeting``: members that are here, then how many they were when one had waited for long enough."""
    if get_atomic(meeting + 8) > 0:
        return
    add_atomic(meeting, 1)
    for _ in range(patience):
        here = get_atomic(meeting)
        if here == threads:
            return
        yield_core()
    put_i64(meeting + 8, here)


@njit(nogil=True, cache=True, error_model="numpy")
def next_item(team: Any) -> Any:
    """The number of a work item that nobody else has taken in this phase, from 0 up."""
    return add_atomic(team + _ITEMS, 1)


@njit(nogil=True, cache=True, error_model="numpy")
def next_of_part(seat: Any, count: Any) -> Any:
    """As ``next_item`` for ``count`` items that lie in a row in memory, ``count`` where none is left.

    A member takes those of its own part in order, so that what it asks from memory ahead is for itself, and then what
    others have left.
    """
    if count < _ITEMS_OF_A_PART * seat.threads:
        return min(next_item(seat.team), count)
    for turn in range(seat.threads):
        owner = (seat.member + turn) % seat.threads
        first, end = owner * count // seat.threads, (owner + 1) * count // seat.threads
        counter = seat.team + _PARTS + 128 * owner
        if first + get_atomic(counter) < end:
            item = first + add_atomic(counter, 1)
            if item < end:
                return item
    return count
