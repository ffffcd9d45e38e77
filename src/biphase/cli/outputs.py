"""Files that a command writes: said before the work when they cannot be, in one line when they then could not."""

from pathlib import Path

from biphase.errors import BadInput, RunFailed


def check_writable(path: Path | None) -> None:
    """``BadInput`` when ``path`` cannot be written. Leaves no file behind that was not there."""
    if path is None:
        return
    existed = path.exists()
    try:
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise BadInput(f"cannot write to {path}: {error.strerror or error}") from error


def write_output(path: Path, content: bytes | str) -> None:
    """Write a result; ``RunFailed`` when the disk is full or the file cannot be written after all."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror or error}") from error
