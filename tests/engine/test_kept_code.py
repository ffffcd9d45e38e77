"""Whether compiled code is kept, which decides if a start says that it compiles, and whether tests compile first."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

numba = pytest.importorskip("numba")

from biphase.engine.build import kernels_are_compiled  # noqa: E402

ASK = "from biphase.engine.build import kernels_are_compiled; print(kernels_are_compiled())"


def ask(**environment: str) -> str:
    command = [sys.executable, "-c", ASK]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_what_this_installation_compiled_is_found() -> None:
    assert kernels_are_compiled()


def test_another_installation_of_the_same_version_compiles_for_itself(tmp_path: Path) -> None:
    """numba keeps code by the path of its source: a start of the second said nothing and took two minutes."""
    import biphase

    shutil.copytree(Path(biphase.__file__).parent, tmp_path / "biphase", ignore=shutil.ignore_patterns("__pycache__"))
    assert ask(PYTHONPATH=str(tmp_path)) == "False\n"


@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="the processor is chosen already")
def test_another_processor_compiles_for_itself() -> None:
    """A home that machines share, or a container's volume."""
    assert ask() == "True\n"
    assert ask(NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES="") == "False\n"
