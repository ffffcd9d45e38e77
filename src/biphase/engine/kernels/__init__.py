"""The operators of both phases, chosen by shape.

Compiled code is kept in a folder named after the sources of all kernels and the processor that they are compiled for:
numba looks only at the file of a function to see whether its code is stale, not at what that file imports, and keeps
code for several processors in one file, so that nobody could see whether this one's is there.
"""

import hashlib
import importlib.util
import os
from pathlib import Path


def user_cache() -> Path:
    """Where this user's derived files go: compiled kernels, packed weights. ``XDG_CACHE_HOME`` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "biphase"


def sources_digest() -> str:
    """A name for this version of the kernels."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def forget_compiled_code() -> bool:
    """Remove what is kept of compiled code, where it cannot be read; False if it lies in a folder of the user's own."""
    import numba

    folder = Path(numba.config.CACHE_DIR)
    if user_cache() not in folder.parents:
        return False
    for file in folder.rglob("*.nb[ic]"):  # index and code of each function
        file.unlink(missing_ok=True)
    return True


def _keep_compiled_code() -> None:
    if importlib.util.find_spec("numba") is None:
        return
    import numba

    if not numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR is the user's own choice
        form = "portable" if os.environ.get("BIPHASE_PORTABLE_KERNELS") == "1" else "native"
        numba.config.CACHE_DIR = str(user_cache() / "kernels" / f"{sources_digest()}-{_processor()}-{form}")


def _processor() -> str:
    """A name for what numba compiles for: this processor, or the one that the user has set."""
    from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
    from numba import config

    name = config.CPU_NAME or get_host_cpu_name()
    features = get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return f"{name}-{hashlib.blake2b(features.encode(), digest_size=4).hexdigest()}"


_keep_compiled_code()
