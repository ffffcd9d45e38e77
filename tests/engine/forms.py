"""The forms that kernels take on other processors, each tested in a process of its own.

Instructions are chosen when kernels compile, and numba's cache does not know by what, so a form has its own cache too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from biphase.engine.kernels.features import features

_INSIDE = "BIPHASE_FORM"

FORMS = {
    "portable": {"BIPHASE_PORTABLE_KERNELS": "1"} | ({"NUMBA_CPU_NAME": "x86-64-v3"} if features().int8_dot else {}),
    "VNNI": {"NUMBA_CPU_NAME": "icelake-server"},
    "VNNI and BF16": {"NUMBA_CPU_NAME": "cooperlake"},
}
"""The first on anything; the others, without AMX, where this processor has what they compile to."""

inside_a_form = _INSIDE in os.environ


def run_tests_in(form: str, test_file: str, cache: Path, only: str = "") -> None:
    """Run ``test_file`` as it would run on such a processor (of it what pytest's -k takes); fail with its output."""
    has = features()
    if (form == "VNNI" and not has.int8_dot) or (form == "VNNI and BF16" and not has.bf16_dot):
        pytest.skip(f"this processor has no {form}")
    environment = os.environ | FORMS[form] | {"NUMBA_CPU_FEATURES": "", _INSIDE: form, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", only, test_file]
    command += ["--timeout", "900"]  # the first test of each kernel compiles it
    root = Path(__file__).parents[2]
    run = subprocess.run(command, check=False, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
