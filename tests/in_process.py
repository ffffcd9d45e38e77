"""A command line run in the process of the tests: one of its own costs a second of imports each time."""

import contextlib
import io
import sys
from subprocess import CompletedProcess
from typing import TextIO

import pytest

from biphase.cli.main import run

KEYS = ("BIPHASE_API_KEY", "OPENAI_API_KEY")
"""What of the machine's environment would change an answer."""


def biphase(*words: str, **environment: str) -> "CompletedProcess[str]":
    """``biphase WORDS``: its status and what it printed. What a process would end with a traceback for is raised."""
    out, err = _kept(), _kept()
    status = biphase_into(out, err, *words, **environment)
    return CompletedProcess(words, status, _text(out), _text(err))


def biphase_into(out: TextIO, err: TextIO, *words: str, **environment: str) -> int:
    """The status of ``biphase WORDS`` that prints there; both are flushed at its end, as those of a process are."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["biphase", *words])
        for name in KEYS:
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run()
    out.flush()
    err.flush()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _kept() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(kept: io.TextIOWrapper) -> str:
    buffer = kept.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()
