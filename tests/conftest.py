"""Settings of every test. Being here puts the folder above on the path, for ``tests.scripted_server`` and the like."""

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from biphase.engine.process import spin_briefly

spin_briefly()  # as in the engine's own process: beside another program a prefill through torch took ten times as long

# Its deadline of 200 ms an example would be a speed measurement, and other programs decide what that gives. The same
# examples each time, so that a run says something of what has changed; BIPHASE_EXPLORE=1 looks for new ones.
settings.register_profile("biphase", deadline=None, derandomize="BIPHASE_EXPLORE" not in os.environ)
settings.load_profile("biphase")


def pytest_sessionstart() -> None:
    """Compile the kernels before the first test where that has not been done: no test's time limit is for that."""
    if importlib.util.find_spec("numba") is None or importlib.util.find_spec("torch") is None:
        return
    if "BIPHASE_FORM" in os.environ:  # a form of the kernels is tested, operation by operation: see engine/forms.py
        return
    from biphase.engine.build import compile_kernels, kernels_are_compiled

    if not kernels_are_compiled():
        print("compiling the kernels, once for this version of them (up to three minutes)", flush=True)
        compile_kernels()


def pytest_collection_finish() -> None:
    """Keep the collector off what the imports made: walking torch and numba took 0.15 s before each of 500 runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def brief_round_trips() -> Iterator[None]:
    """Between its round trips a measurement idles for 0.3 s in all, so that caches cool: no test looks at how warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphase.client.endpoint.IDLE_S", 0.001)
        yield
