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


def check_outputs(**options: Path | None) -> None:
    """``check_writable`` for all files of a command, by option; ``BadInput`` where two options name the same file."""
    seen: dict[Path, str] = {}
    for option, path in options.items():
        if path is not None and path != Path("/dev/null"):
            other = seen.setdefault(path.resolve(), option)
            if other != option:
                raise BadInput(
                    f"--{other} and --{option} name the same file, {path}: only the last written would be left"
                )
        check_writable(path)


def write_output(path: Path, content: bytes | str) -> None:
    """Write a result; ``RunFailed`` when the disk is full or the file cannot be written after all."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror or error}") from error
