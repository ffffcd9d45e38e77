"""How a worker of bench/ answers: one JSON line in, one out. Standard library alone; workers run in any environment."""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that the death of the parent sends


@dataclass(frozen=True)
class Question:
    """What is timed: a prefill of ``tokens``, or ``tokens`` steps of ``sequences`` that decode after ``context``."""

    phase: str
    tokens: int
    sequences: int = 1
    context: int = 0

    @property
    def counted(self) -> int:
        """Tokens that the seconds are divided into: prompt tokens, or generated ones of all sequences."""
        return self.tokens * self.sequences

    @property
    def longest(self) -> int:
        """Tokens that a sequence holds at the end."""
        return self.context + self.tokens + 1

    def json(self) -> str:
        return json.dumps(asdict(self))


def prompt(length: int, first: int) -> list[int]:
    """Token ids of ordinary text in every vocabulary of 32,000 or more; ``first`` makes it like no other prompt."""
    return [1000 + first, *(1000 + i * 7919 % 30000 for i in range(1, length))]


def private_stdout() -> TextIO:
    """A stream to the old stdout; from now on what a library prints there goes to stderr.

    Also ties the process to its parent: a worker that is stopped between questions would outlive a killed one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def serve(out: TextIO, about: str, answer: Callable[[Any], Any]) -> None:
    """Say what this is, then answer each line of stdin until it ends."""
    print(json.dumps({"about": about}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)
