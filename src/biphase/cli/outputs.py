"""Files that a command writes: said before the work when they cannot be, in one line when they then could not."""

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from biphase.errors import BadInput, RunFailed
from biphase.report.terminal import silence

Content = Callable[[], bytes | str]


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


def deliver(show: Callable[[], None], *files: tuple[Path | None, Content]) -> None:
    """Print a result and write its files, each also where another cannot be written; then raise the first failure.

    A run of many minutes must not lose its file to a closed pipe, nor its table to a full disk.
    """
    failures: list[Exception] = []
    try:
        show()
        flush_stdout()
    except OSError as error:
        failures.append(error)
    except SystemExit:  # what rich makes of a pipe that nobody reads
        failures.append(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
    for path, content in files:
        try:
            if path is not None:
                write_output(path, content())
        except RunFailed as error:
            failures.append(error)
    if failures:
        raise failures[0]


def flush_stdout() -> None:
    """``OSError`` where stdout does not take what was printed. There is none where it was closed from the start."""
    if sys.stdout is not None:
        sys.stdout.flush()


def stdout_takes_nothing() -> bool:
    """Whether an error was that of printing: then what is left to print goes nowhere, and fails no second time."""
    try:
        flush_stdout()
        if sys.stdout is not None:
            os.write(sys.stdout.fileno(), b"\n")  # a write that failed may have thrown away what a flush would show
    except OSError:
        silence(sys.stdout)
        return True
    return False


def show_any_character() -> None:
    """Where the terminal's encoding lacks a character, a question mark stands for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
