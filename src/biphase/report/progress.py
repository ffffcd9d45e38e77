"""What a user sees on stderr while something takes long: a bar on a terminal, a plain line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from biphase.report.terminal import say

PLAIN_EVERY_S = 10.0


class Display(Protocol):
    """Shows what is going on; ``step`` also how far it is."""

    def status(self, text: str) -> None: ...

    def step(self, done: int, total: int, text: str) -> None: ...


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def status(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def step(self, done: int, total: int, text: str) -> None:
        self._progress.update(self._task, description=text, completed=done, total=total)


class _Lines:
    """A line for each new status, and for steps one in ten seconds."""

    def __init__(self) -> None:
        self._last_status = ""
        self._last_step = 0.0

    def status(self, text: str) -> None:
        if text != self._last_status:
            self._last_status = text
            say(text)

    def step(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if now - self._last_step >= PLAIN_EVERY_S:
            self._last_step = now
            say(f"{done} of {total}: {text}")


@contextmanager
def display() -> Iterator[Display]:
    """A bar that vanishes when done, if stderr is a terminal; plain lines if not."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)
