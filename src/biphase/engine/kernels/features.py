"""What the processor that kernels are compiled for can do, decided before anything is compiled.

LLVM does not raise on an instruction that its target lacks: it aborts the process. So the features are those of the
target that numba will compile for (``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` included), not those of the host.
"""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass, fields
from functools import cache

PORTABLE = "BIPHASE_PORTABLE_KERNELS"
"""Set to 1, every operation takes its portable form; the tests and a doubtful user compare the two."""

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True, slots=True)
class Features:
    """``int8_dot`` is AVX512-VNNI, ``bf16_dot`` AVX512-BF16, ``tiles`` AMX with int8 and bfloat16."""

    int8_dot: bool = False
    bf16_dot: bool = False
    tiles: bool = False

    def __str__(self) -> str:
        return ", ".join(f.name.replace("_", " ") for f in fields(self) if getattr(self, f.name)) or "portable"


@cache
def features() -> Features:
    """Of this process; the first call asks the kernel for the use of AMX, which Linux grants by process."""
    if os.environ.get(PORTABLE) == "1" or platform.machine() not in ("x86_64", "AMD64"):
        return Features()
    target = frozenset(target_of_numba()[1].split(","))
    if "+avx512f" not in target:
        return Features()
    tiles = {"+amx-tile", "+amx-int8", "+amx-bf16"} <= target and _request_tiles()
    return Features("+avx512vnni" in target, "+avx512bf16" in target, tiles)


def target_of_numba() -> tuple[str, str]:
    """The processor that numba compiles for and its features, in LLVM's names, with commas between."""
    from numba.core.registry import cpu_target

    _, processor, names = cpu_target.target_context.codegen().magic_tuple()
    return processor, names


def _request_tiles() -> bool:
    """Linux keeps AMX's 8 KB of tile state from a process until it asks (Documentation/arch/x86/xstate.rst)."""
    if not sys.platform.startswith("linux"):
        return False
    request = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(request == 0)
