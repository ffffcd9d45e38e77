"""How wide tables are where there is no terminal that could say, and what to do with a stream that takes no more."""

import os
import sys
from typing import TextIO

from biphase.redaction import redacted

PIPED_WIDTH = 110
"""Columns of a table in a pipe or a file."""


def silence(stream: TextIO) -> None:
    """Let a stream that takes no more write to nowhere, so that what it still holds fails no second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str) -> None:
    """A line on stderr without secrets; where that takes none, as with a pipe that nobody reads, life goes on."""
    if sys.stderr is None:  # closed from the start
        return
    try:
        print(redacted(text), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
