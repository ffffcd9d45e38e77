"""``biphase stall`` as a user runs it: outputs, files, statuses, signals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from biphase.analysis.stall_result import ServerStall, StallResult
from biphase.client.record import read_records
from tests.in_process import biphase
from tests.law_server import law_server
from tests.scripted_server import scripted
from tests.slot_server import slot_server

QUICK = {"first_token_s": 0.01, "gap_s": 0.003, "usage": "continuous"}
LAWS: dict[str, Any] = {"a": 15.0, "b": 0.05, "c": 1e-6, "t0": 4.0, "w": 0.25, "k": 5e-5}
"""Half of the law server's own times."""
SMALL = ("--victims", "2", "--prompt", "200", "--repeats", "1")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "biphase", "stall", *words]


def stall(*words: str) -> "subprocess.CompletedProcess[str]":
    return biphase("stall", *words)


@pytest.fixture(autouse=True)
def few_steps_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 steps are left to the streams in case the server becomes twice as fast: these keep to their laws."""
    monkeypatch.setattr("biphase.experiments.stall.AFTER_STEPS", 16)


def test_two_servers_in_one_table_one_file_and_one_picture(tmp_path: Path) -> None:
    json_path, html_path, records = tmp_path / "s.json", tmp_path / "s.html", tmp_path / "s.jsonl"
    files = ("--json", str(json_path), "--html", str(html_path), "--records", str(records))
    with law_server(**LAWS) as whole, law_server(**LAWS, chunk=100) as chunked:
        ended = stall(whole, "--compare", chunked, "--victims", "2", "--prompt", "600", "--repeats", "1", *files)
    assert ended.returncode == 0, ended.stderr
    assert "2 streams decode while a prompt of 600 tokens arrives, once" in ended.stdout
    for heading in ("quiet ITL ms", "p99 gap ms", "worst gap ms", "stalled s", "TTFT ms"):
        assert heading in ended.stdout
    assert "A: The server prefills 600 tokens in one piece" in ended.stdout
    assert "B: The server prefills in chunks of about" in ended.stdout
    result: dict[str, Any] = json.loads(json_path.read_text())
    assert set(result) == set(StallResult.__struct_fields__)
    assert [server["name"] for server in result["servers"]] == ["A", "B"]
    assert set(result["servers"][0]) == set(ServerStall.__struct_fields__)
    assert result["servers"][1]["prefill_gap_ms"]["worst"] < result["servers"][0]["prefill_gap_ms"]["worst"]
    page = html_path.read_text()
    assert page.count("prefill of the prompt") == 2
    assert page.count("<svg") == 1
    prompts = [r for r in read_records(records) if r.id == "attack-1/prompt"]
    assert [r.asked_prompt_tokens for r in prompts] == [600, 600]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["not a url"], "not the URL of a server: 'not a url'"),
        (["smollm2-135m"], "smollm2-135m names a model, not a server"),
        (["http://h", "--compare", "x y"], "not the URL of a server: 'x y'"),
        (["--compare", "http://h"], "--compare needs a URL to compare with"),
        (["http://h", "--compare-model", "m"], "--compare URL2 is missing"),
        (["http://h", "--victims", "0"], "--victims 0: expected 1 to 1,024"),
        (["http://h", "--prompt", "0"], "--prompt 0: expected 1 to 1,000,000"),
        (["http://h", "--repeats", "0"], "--repeats 0: expected 1 to 10,000"),
        (
            ["http://h", "--itl-slo", "50"],
            "--itl-slo '50': expected a time with its unit, 1us to 3600s, as in 50ms or 0.05s",
        ),
        (["http://h", "--itl-slo", "0ms"], "--itl-slo '0ms': expected a time"),
        (["http://h", "--itl-slo", "nan"], "--itl-slo 'nan': expected a time"),
        (["http://h", "--timeout", "0"], "--timeout 0: expected 0.001 to 2,678,400 seconds"),
        (["http://h", "--dtype", "float32"], "--dtype is for the built-in engine"),
        (["http://h", "--json", "/nowhere/x.json"], "cannot write to /nowhere/x.json: No such file"),
        (["http://h", "--html", "/nowhere/x.html"], "cannot write to /nowhere/x.html: No such file"),
        (["http://h", "--records", "/nowhere/x"], "cannot write to /nowhere/x: No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: list[str], line: str) -> None:
    ended = stall(*words)
    assert ended.returncode == 2
    assert ended.stderr.startswith("biphase: ")
    assert line in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ({"api_key": "secret"}, "set BIPHASE_API_KEY or pass --api-key"),
        ({"has_models": False}, "name one: --model NAME"),
        ({"models": ("a", "b")}, "say which: --model NAME"),
        ({"streams": False}, "the server did not stream"),
    ],
)
def test_a_failure_is_one_line(script: dict[str, Any], line: str) -> None:
    with scripted(**{**QUICK, **script}) as url:
        ended = stall(url, *SMALL)
    assert ended.returncode in (1, 2)
    errors = [found for found in ended.stderr.splitlines() if found.startswith("biphase: ")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in ended.stderr


def test_a_key_goes_to_the_server() -> None:
    with scripted(**QUICK, api_key="secret") as url:
        assert stall(url, *SMALL, "--api-key", "secret").returncode == 0


def test_a_second_server_that_is_not_there_keeps_the_first(tmp_path: Path) -> None:
    with scripted() as gone:
        pass
    with law_server(**LAWS) as url:
        ended = stall(url, "--compare", gone, *SMALL, "--json", str(tmp_path / "s.json"))
    assert ended.returncode == 1
    assert "no connection" in ended.stderr.splitlines()[-1]
    assert "A: While the prompt was prefilled" in ended.stdout
    assert len(json.loads((tmp_path / "s.json").read_text())["servers"]) == 1


@pytest.mark.parametrize(
    ("dies_after", "what"),
    [
        (1, "the warm-up with a prompt of 200 tokens failed after 0 good ones"),
        (2, "request alone-200-0 failed after 1 good one"),
    ],
)
def test_a_server_that_goes_away_before_any_stream_is_said_to_be_gone(dies_after: int, what: str) -> None:
    with scripted(**QUICK, dies_after=dies_after) as url:
        ended = stall(url, *SMALL)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"biphase: {what}, and the server is gone: {url}/v1/completions: ")
    assert ended.stdout.startswith("2 streams were to decode while a prompt of 200 tokens arrives\n")


def test_a_refusal_is_no_server_that_is_gone() -> None:
    with scripted(**QUICK, cut_after=1) as url:
        ended = stall(url, *SMALL)
    assert ended.returncode == 1
    assert "is gone" not in ended.stderr


def test_a_server_that_dies_midway_leaves_a_table_and_files(tmp_path: Path) -> None:
    """Quiet streams, warm-up and one repeat have gone through when it ends."""
    with slot_server(slots=8, first_s=0.01, gap_s=0.003, dies_after=14) as url:
        ended = stall(url, "--victims", "2", "--prompt", "200", "--repeats", "9", "--json", str(tmp_path / "s.json"))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("biphase: request ")
    assert "Traceback" not in ended.stderr
    result = json.loads((tmp_path / "s.json").read_text())
    assert result["servers"][0]["attacks"] >= 1
    assert result["error"] is not None
    assert "quiet ITL ms" in ended.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(number: signal.Signals, tmp_path: Path) -> None:
    """After the first repeat; the table and the file are there, the status is 128 + the signal."""
    records, result = tmp_path / "s.jsonl", tmp_path / "s.json"
    words = ("--victims", "2", "--prompt", "300", "--repeats", "500", "--json", str(result), "--records", str(records))
    with law_server(a=5, b=0.01, c=0.0, t0=1.5, w=0.1, k=0.0) as url:
        pipe = subprocess.PIPE
        with subprocess.Popen(command(url, *words), stdout=pipe, stderr=pipe, text=True) as process:
            deadline = time.monotonic() + 60
            while not records.exists() or "attack-2/" not in records.read_text():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "incomplete: interrupted" in out
    assert json.loads(result.read_text())["servers"][0]["attacks"] >= 1
