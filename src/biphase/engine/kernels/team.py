"""A team: the threads of one parallel region that run a whole program together, phase by phase.

Opening a parallel region costs microseconds and a step has hundreds of phases, so the region is opened once and its
threads meet at a barrier between phases. Inside a phase they take work items from a counter, so that a thread that
the system has put aside delays nobody but at the end of the phase.

All members must run at the same time: a program is started as ``prange(threads)`` with ``threads`` not above
``numba.get_num_threads()``, under a threading layer that gives every iteration its own thread (OpenMP, workqueue).
"""

import sys
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from biphase.engine.kernels.vectors import I32, add_atomic, call, get_atomic, operation, pause, put_i64

_ARRIVED, _ROUND, _ITEMS = 0, 128, 256
"""Byte offsets of the three counters: 128 apart, since the hardware fetches cache lines in pairs."""

_SPINS = 4000
"""Looks at the barrier before a waiting thread offers its core to others: 20 to 200 microseconds."""

_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def _yield_core(b: Any) -> None:
    call(b, _YIELD, I32)


yield_core = operation(types.void, [], _yield_core)
"""Let another thread that waits for this core run."""


def new_team() -> NDArray[np.int64]:
    """The counters of one team, at rest. They are at rest again after every program, so a team serves many."""
    return np.zeros(48, dtype=np.int64)


@njit(nogil=True, cache=True, error_model="numpy")
def barrier(team: Any, threads: Any) -> None:
    """Wait until all ``threads`` members of the team at address ``team`` are here; the items then start again at 0."""
    this_round = get_atomic(team + _ROUND)
    if add_atomic(team + _ARRIVED, 1) == threads - 1:
        put_i64(team + _ARRIVED, 0)
        put_i64(team + _ITEMS, 0)
        add_atomic(team + _ROUND, 1)
        return
    looks = 0
    while get_atomic(team + _ROUND) == this_round:
        looks += 1
        if looks < _SPINS:
            pause()
        else:
            yield_core()


@njit(nogil=True, cache=True, error_model="numpy")
def next_item(team: Any) -> Any:
    """The number of a work item that nobody else has taken in this phase, from 0 up."""
    return add_atomic(team + _ITEMS, 1)
