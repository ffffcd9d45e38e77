"""A file that takes the place of an earlier one with its first write: a run that measures nothing costs no file."""

from pathlib import Path
from types import TracebackType
from typing import Self


class ReplacedFile:
    """Unbuffered; ``OSError`` where the file cannot be opened, and of each write that fails."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._earlier = path.is_file()  # a pipe or a device has no content to take away

    def write(self, data: bytes) -> None:
        """Append to what was written here."""
        if self._earlier:
            self._file.truncate(0)
        self._earlier = False
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
