"""The command as a user types it: help, bad input, and what is printed where."""

import subprocess
import sys

import pytest

from tests.in_process import biphase


def test_help_names_the_commands() -> None:
    command = [sys.executable, "-m", "biphase", "--help"]
    shown = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert "profile" in shown.stdout
    assert "serve" in shown.stdout


def test_help_of_profile_names_its_options_and_defaults() -> None:
    shown = biphase("profile", "--help", COLUMNS="120").stdout
    for word in ("--model", "--lengths", "1,16,128,512,2048", "--tokens", "--repeats", "--json", "--records"):
        assert word in shown
    for word in ("--api-key", "BIPHASE_API_KEY", "OPENAI_API_KEY", "--header", "--timeout", "--dtype"):
        assert word in shown


def test_help_loads_nothing_heavy() -> None:
    """Not numpy, not aiohttp, not torch: what a command needs is imported when it runs."""
    script = (
        "import sys\n"
        "from biphase.cli import main\n"
        "print([m for m in ('numpy', 'torch', 'aiohttp', 'scipy', 'plotly', 'starlette') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["profile", "not a url"],
            "not the URL of a server: 'not a url'; expected something like http://127.0.0.1:8000",
        ),
        (["profile", "smollm2-135m"], "smollm2-135m names a model, not a server; to measure it on the built-in engine"),
        (["profile", "http://h", "--lengths", "1,x"], "--lengths '1,x': expected whole numbers of tokens, 1 or more"),
        (["profile", "http://h", "--lengths", "0"], "--lengths '0': expected whole numbers of tokens, 1 or more"),
        (["profile", "http://h", "--lengths", ""], "--lengths '': expected whole numbers"),
        (["profile", "http://h", "--tokens", "1"], "--tokens 1: expected 2 to 1,000,000"),
        (["profile", "http://h", "--repeats", "0"], "--repeats 0: expected 1 to 10,000"),
        (["profile", "http://h", "--timeout", "0"], "--timeout 0: expected 0.001 to 2,678,400 seconds"),
        (["profile", "http://h", "--header", "X"], "--header 'X': expected 'Name: value'"),
        (["profile", "http://h", "--dtype", "float32"], "--dtype is for the built-in engine"),
        (["profile", "http://h", "--json", "/nowhere/x.json"], "cannot write to /nowhere/x.json: No such file"),
        (["profile", "http://h", "--records", "/nowhere/x"], "cannot write to /nowhere/x: No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: list[str], line: str) -> None:
    ended = biphase(*words, COLUMNS="120")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"biphase: {line}")
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""
