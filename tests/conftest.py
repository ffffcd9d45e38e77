"""Settings of every test. Being here puts the folder above on the path, for ``tests.scripted_server`` and the like."""

import importlib.util
import os

from hypothesis import settings

# Its deadline of 200 ms an example would be a speed measurement, and other programs decide what that gives.
settings.register_profile("biphase", deadline=None)
settings.load_profile("biphase")


def pytest_sessionstart() -> None:
    """Compile the kernels before the first test where that has not been done: no test's time limit is for that."""
    if importlib.util.find_spec("numba") is None or importlib.util.find_spec("torch") is None:
        return
    if "BIPHASE_FORM" in os.environ:  # a form of the kernels is tested, operation by operation: see engine/forms.py
        return
    from biphase.engine.build import compile_kernels, kernels_are_compiled

    if not kernels_are_compiled():
        print("compiling the kernels, once for this version of them (a minute or two)", flush=True)
        compile_kernels()
