"""Whether compiled code is kept, which decides if a start says that it compiles, and whether tests compile first."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

numba = pytest.importorskip("numba")
pytest.importorskip("torch")

from biphase.engine.build import kernels_are_compiled  # noqa: E402

ASK = "from biphase.engine.build import kernels_are_compiled; print(kernels_are_compiled())"

READ_ONLY = """
import os, tempfile
make = tempfile.TemporaryFile
def in_other_folders(dir):
    if str(dir).startswith(os.environ["XDG_CACHE_HOME"]):
        raise OSError(30, "Read-only file system")
    return make(dir=dir)
tempfile.TemporaryFile = in_other_folders"""
"""As tests run by root see no folder that they may not write."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A cache folder where this installation's code is."""
    folder = tmp_path / "cache" / "biphase" / "kernels" / Path(numba.config.CACHE_DIR).name
    shutil.copytree(numba.config.CACHE_DIR, folder, copy_function=os.symlink)
    return tmp_path / "cache"


def run(code: str, **environment: str) -> list[str]:
    """What it prints, line by line, in a process of its own with these variables and no other of numba's."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=others | environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_this_installation_compiled_is_found(shared: Path) -> None:
    assert kernels_are_compiled()
    assert run(ASK, XDG_CACHE_HOME=str(shared)) == ["True"]


def test_an_index_whose_code_is_missing_is_not_enough(shared: Path) -> None:
    for file in shared.rglob("*.nbc"):
        file.unlink()
    assert run(ASK, XDG_CACHE_HOME=str(shared)) == ["False"]


@pytest.mark.parametrize("kernel", ["few_rows.multiply_panel", "flash.attend", "row_attention.attend"])
def test_nor_are_programs_without_a_kernel_that_they_call(kernel: str, shared: Path) -> None:
    """That tests compile the same function for themselves changes nothing."""
    called = list(shared.rglob(f"{kernel}_out_of_line-*.nbi"))
    assert called
    for file in called:
        file.unlink()
    assert run(ASK, XDG_CACHE_HOME=str(shared)) == ["False"]


def test_a_cache_that_can_only_be_read_is_used(shared: Path) -> None:
    """An image's, or an administrator's. Its copy ends with the process."""
    where = f"{READ_ONLY}\nimport numba; {ASK}; print(numba.config.CACHE_DIR)"
    compiled, folder = run(where, XDG_CACHE_HOME=str(shared))
    assert compiled == "True"
    assert shared not in Path(folder).parents
    assert not Path(folder).exists()


def test_another_installation_of_the_same_version_compiles_for_itself(shared: Path, tmp_path: Path) -> None:
    """numba keeps code by the path of its source: a start of the second said nothing and took two minutes."""
    import biphase

    shutil.copytree(Path(biphase.__file__).parent, tmp_path / "biphase", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(ASK, XDG_CACHE_HOME=str(shared), PYTHONPATH=str(tmp_path)) == ["False"]


def test_another_processor_compiles_for_itself(shared: Path) -> None:
    """A home that machines share, or a container's volume."""
    other = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}
    assert run(ASK, XDG_CACHE_HOME=str(shared), **other) == ["False"]


def test_code_of_other_sources_is_not_found_in_a_folder_of_the_users_own(tmp_path: Path) -> None:
    """numba would run what an earlier version compiled there, on panels of another format."""
    folder, where = numba.config.CACHE_DIR, f"import numba; {ASK}; print(numba.config.CACHE_DIR)"
    own = tmp_path / "own"
    assert run(where, NUMBA_CACHE_DIR=str(own)) == ["False", str(own / Path(folder).name)]
    assert run(where, NUMBA_CACHE_DIR=folder) == ["True", folder]


def test_without_a_folder_to_keep_it_in_nothing_of_others_is_run(tmp_path: Path) -> None:
    """numba would fall back to a folder beside the source, which no version is the name of."""
    (tmp_path / "biphase").touch()
    inside = f"import numba, os; {ASK}; print(os.path.isdir(numba.config.CACHE_DIR)); print(numba.config.CACHE_DIR)"
    compiled, there, folder = run(inside, XDG_CACHE_HOME=str(tmp_path))
    assert (compiled, there) == ("False", "True")
    assert not Path(folder).exists()
