"""The operators of both phases, chosen by shape.

Compiled code is kept in a folder of its own for whatever may change it: numba looks only at the file of a function to
see whether its code is stale, not at what that file imports, and keeps code for several processors in one file, so that
nobody could see whether this one's is there.
"""

import atexit
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import suppress
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
    """Remove what is kept of compiled code, where it cannot be read. False if there is none, or in a user's folder."""
    if not can_compile():
        return False
    import numba

    folder = Path(numba.config.CACHE_DIR)
    if user_cache() not in folder.parents:
        return False
    files = list(folder.rglob("*.nb[ic]"))  # index and code of each function
    for file in files:
        file.unlink(missing_ok=True)
    return bool(files)


def can_compile() -> bool:
    """Whether numba is installed and not switched off."""
    switched_off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return importlib.util.find_spec("numba") is not None and not switched_off


def _prepare_numba() -> None:
    """A folder for compiled code, and threads that run all at once, as a team needs them: TBB's need not."""
    if not can_compile():
        return
    import numba

    numba.config.THREADING_LAYER_PRIORITY.sort(key=lambda layer: layer == "tbb")
    if numba.config.THREADING_LAYER.lower() not in ("omp", "workqueue"):
        numba.config.THREADING_LAYER = "default"
    chosen, name = numba.config.CACHE_DIR, _code_name()
    folder = Path(chosen or user_cache() / "kernels")  # NUMBA_CACHE_DIR is the user's own choice
    folder = folder if folder.name == name else folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # nothing can be kept: numba would look for other folders, whose code may be of other sources
        folder = _temporary_copy(folder)
    numba.config.CACHE_DIR = str(folder)


_temporary: list[Path] = []


def _temporary_copy(folder: Path) -> Path:
    """A folder of this process alone, with what can be read of ``folder``."""
    copy = Path(tempfile.mkdtemp(prefix="biphase-kernels-"))
    _temporary.append(copy)
    atexit.register(remove_temporary_code)
    with suppress(OSError):
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    return copy


def remove_temporary_code() -> None:
    """Of a cache that cannot be written: at the end of the process, however it ends."""
    for folder in _temporary:
        shutil.rmtree(folder, ignore_errors=True)


def _code_name() -> str:
    """Sources, compiler, processor and what of it is used."""
    import numba

    from biphase.engine.kernels.features import features, target_of_numba

    processor, names = target_of_numba()
    made_by = (numba.__version__, sys.implementation.cache_tag, processor, names, str(features()))
    digest = hashlib.blake2b("\0".join(made_by).encode(), digest_size=4).hexdigest()
    return f"{sources_digest()}-{processor}-{digest}"


_prepare_numba()
