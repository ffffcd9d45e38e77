"""Tests of times on a machine that others use too.

What else runs can only disturb a measurement, never mend one: an honest clock passes a tolerance as soon as it is left
alone once, a biased one never does. So a check of times is repeated until it holds.
"""

from collections.abc import Callable

ATTEMPTS = 6


def holds_when_undisturbed(check: Callable[[], None]) -> None:
    """Run ``check`` until it passes, six times at most; the last failure is the test's."""
    for _ in range(ATTEMPTS - 1):
        try:
            return check()
        except AssertionError:
            continue
    return check()
