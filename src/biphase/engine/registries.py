"""numba's tables of what it can compile, which it loads before the first kernel, cached or not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def load_registries() -> None:
    """Load the dearest of them without scipy.linalg, which takes 0.3 s and serves only ``np.dot`` in kernels.

    numba looks for it when it loads its array functions, to know whether they may call BLAS; no kernel here does.
    """
    with _hidden("scipy.linalg"):
        import numba.np.arraymath  # noqa: F401


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Let the import of a module fail as that of one that is not installed; one that is imported stays."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
