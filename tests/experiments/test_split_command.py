"""``biphase split`` as a user runs it: outputs, files, statuses, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from biphase.cli.split import make_plan, parse_time
from biphase.errors import BadInput
from tests.analysis.engine_pages import PAGES
from tests.analysis.exposition import texts
from tests.in_process import biphase
from tests.metrics_server import Answer, metrics_server, pages

BEFORE, AFTER = texts("python", PAGES["vllm new"].metrics)
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("BIPHASE_API_KEY", "OPENAI_API_KEY")}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "biphase", "split", *words]


def split(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return biphase("split", *words, **environment)


def test_table_on_stdout_and_all_files(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html"), "--save", str(tmp_path / "s.txt")]
    with metrics_server(pages(BEFORE, AFTER)) as url:
        ended = split(f"{url}/v1", "--for", "300ms", "--every", "100ms", *files)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert any("tokens" in line and "1,100" in line and "392" in line and "74 %" in line for line in lines)
    assert any("request-seconds" in line and "20 %" in line for line in lines)
    assert any("engine-seconds" in line and "not known" in line for line in lines)
    result: dict[str, Any] = json.loads((tmp_path / "s.json").read_text())
    assert result["tokens"]["prefill"]["value"] == 1100
    assert result["engine_s"]["prefill"] is None
    assert result["command"].startswith("biphase split http://")
    assert "vLLM: prefill and decode of live traffic" in (tmp_path / "s.html").read_text()
    again = split("--from", str(tmp_path / "s.txt"))
    assert again.returncode == 0, again.stderr
    assert "1,100" in again.stdout


def test_several_files_follow_one_from(tmp_path: Path) -> None:
    for name, text in (("a", BEFORE), ("b", AFTER)):
        (tmp_path / name).write_text(text)
    ended = split("--from", str(tmp_path / "a"), str(tmp_path / "b"))
    assert ended.returncode == 0, ended.stderr
    assert "file-times" in ended.stdout


def test_the_key_comes_from_the_environment() -> None:
    def locked(path: str, headers: Any) -> Answer:
        return Answer(BEFORE) if headers.get("Authorization") == "Bearer secret" else Answer("no", 401)

    with metrics_server(locked) as url:
        brief = (url, "--for", "200ms")
        assert split(*brief, BIPHASE_API_KEY="secret").returncode == 0
        assert split(*brief, "--header", "Authorization: Bearer secret").returncode == 0
        refused = split(*brief)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("HTTP 401: no; set BIPHASE_API_KEY or pass --api-key")


def interrupted(url: str, tmp_path: Path, number: signal.Signals, *words: str) -> tuple[int, str, str]:
    """Status and outputs of a watch that a signal ends after its second scrape."""
    every = command(url, "--every", "100ms", "--save", str(tmp_path / "s.txt"), *words)
    pipe = subprocess.PIPE
    with subprocess.Popen(every, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        deadline = time.monotonic() + 50
        while not (tmp_path / "s.txt").exists() or (tmp_path / "s.txt").read_text().count("# biphase scrape") < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(3):
            process.send_signal(number)
        out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("words", "number", "status"),
    [
        (["--for", "1h"], signal.SIGINT, 130),
        (["--for", "1h"], signal.SIGTERM, 143),
        (["--watch"], signal.SIGINT, 0),
    ],
)
def test_a_signal_keeps_what_was_measured(
    tmp_path: Path, words: list[str], number: signal.Signals, status: int
) -> None:
    with metrics_server(pages(BEFORE, AFTER)) as url:
        ended, out, err = interrupted(url, tmp_path, number, *words, "--json", str(tmp_path / "s.json"))
    assert ended == status, err
    assert "Traceback" not in err
    assert "1,100" in out
    assert ("incomplete: interrupted" in out) == bool(status)
    assert json.loads((tmp_path / "s.json").read_text())["tokens"]["prefill"]["value"] == 1100


def test_a_watch_in_a_pipe_is_a_line_a_scrape() -> None:
    with metrics_server(pages(BEFORE, AFTER)) as url:
        ended = split(url, "--watch", "--for", "300ms", "--every", "100ms")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "waiting for the second scrape"
    assert lines[1].startswith("tokens/s: prefill ")
    assert "tokens 74 % prefill, request-s 20 % prefill; running 6" in lines[1]
    assert "no traffic" in lines[2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "what to watch? give a server's URL"),
        (["http://a:1", "http://b:1"], "one server at a time"),
        (["nothing"], "not the URL of a server: 'nothing'"),
        (["model.gguf"], "names a model, not a server"),
        (["http://a:1", "--for", "0"], "--for '0': expected a time"),
        (["http://a:1", "--for", "soon"], "--for 'soon': expected a time"),
        (["http://a:1", "--every", "-1s"], "--every '-1s': expected a time"),
        (["http://a:1", "--header", "x"], "expected 'Name: value'"),
        (["http://a:1", "--ca", "/nonexistent"], "--ca /nonexistent"),
        (["http://a:1", "--save", "/nonexistent/x"], "cannot write to /nonexistent/x"),
        (["http://a:1", "--html", "/nonexistent/x"], "cannot write to /nonexistent/x"),
        (["http://a:1", "--laws", "/nonexistent/p.json"], "cannot read /nonexistent/p.json"),
        (["--from", "/nonexistent/x"], "cannot read scrapes from /nonexistent/x"),
        (["--from", "/nonexistent/x", "--watch"], "leave --watch away"),
        (["--from", "/nonexistent/x", "--save", "y"], "leave --save away"),
        (["http://a:1", "--from", "/nonexistent/x"], "--from watches nothing: leave http://a:1 away"),
        (["--from", "/nonexistent/x", "localhost:1"], "--from watches nothing: leave localhost:1 away"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(words: list[str], line: str) -> None:
    done = split(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("biphase: ")
    assert done.stderr.count("\n") == 1
    assert line in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_without_an_address() -> None:
    with metrics_server(pages(BEFORE, AFTER)) as url:
        ended = split(url, "--for", "300ms", "--save", "/dev/full")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "biphase: cannot write scrapes to /dev/full: No space left on device\n"


def test_no_server_is_one_line_and_status_1() -> None:
    done = split("http://127.0.0.1:1", "--for", "1s")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "biphase: http://127.0.0.1:1/metrics: no connection (Connection refused); is the server running, and is the "
        "port right?\n"
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("90", 90), ("1.5m", 90), ("2min", 120), ("1h", 3600), ("250ms", 0.25)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time("--for", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1d", "-5s", "1e3", "nan", "inf", "0.01s", "99999h", "1 2"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(BadInput, match="expected a time from 100ms to 31 days"):
        parse_time("--for", text)


def test_a_minute_without_watch_and_no_end_with_it() -> None:
    assert make_plan(None, "2s", watch=False).seconds == 60
    assert make_plan(None, "2s", watch=True).seconds is None
    assert make_plan("5s", "2s", watch=True).seconds == 5
    assert make_plan("1s", "2s", watch=False).every == 1
