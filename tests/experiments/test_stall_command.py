"""``biphase stall`` as a user runs it: outputs, files, statuses, signals."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from biphase.analysis.stall_result import ServerStall, StallResult
from biphase.cli.main import run
from biphase.client.record import read_records
from tests.law_server import law_server
from tests.scripted_server import scripted
from tests.slot_server import slot_server

QUICK = {"first_token_s": 0.01, "gap_s": 0.004, "usage": "continuous"}
SMALL = ("--victims", "2", "--prompt", "200", "--repeats", "1")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "biphase", "stall", *words]


@dataclass(frozen=True)
class Ended:
    """How a command ended in this process: a process of its own would cost a second of imports each time."""

    status: object
    out: str
    err: str


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    for name in ("BIPHASE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run_here(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["biphase", "stall", *words])
        with pytest.raises(SystemExit) as ended:
            run()
        return Ended(ended.value.code, *capsys.readouterr())

    return run_here


def test_two_servers_in_one_table_one_file_and_one_picture(here: Callable[..., Ended], tmp_path: Path) -> None:
    json_path, html_path, records = tmp_path / "s.json", tmp_path / "s.html", tmp_path / "s.jsonl"
    files = ("--json", str(json_path), "--html", str(html_path), "--records", str(records))
    with law_server() as whole, law_server(chunk=100) as chunked:
        ended = here(whole, "--compare", chunked, "--victims", "2", "--prompt", "600", "--repeats", "1", *files)
    assert ended.status == 0, ended.err
    assert "2 streams decode while a prompt of 600 tokens arrives, once" in ended.out
    for heading in ("quiet ITL ms", "p99 gap ms", "worst gap ms", "stalled s", "TTFT ms"):
        assert heading in ended.out
    assert "A: The server prefills 600 tokens in one piece" in ended.out
    assert "B: The server prefills in chunks of about" in ended.out
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
def test_bad_input_is_one_line_and_status_2(here: Callable[..., Ended], words: list[str], line: str) -> None:
    ended = here(*words)
    assert ended.status == 2
    assert ended.err.startswith("biphase: ")
    assert line in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ({"api_key": "secret"}, "set BIPHASE_API_KEY or pass --api-key"),
        ({"has_models": False}, "name one: --model NAME"),
        ({"models": ("a", "b")}, "say which: --model NAME"),
        ({"streams": False}, "the server did not stream"),
    ],
)
def test_a_failure_is_one_line(here: Callable[..., Ended], script: dict[str, Any], line: str) -> None:
    with scripted(**{**QUICK, **script}) as url:
        ended = here(url, *SMALL)
    assert ended.status in (1, 2)
    errors = [found for found in ended.err.splitlines() if found.startswith("biphase: ")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in ended.err


def test_a_key_goes_to_the_server(here: Callable[..., Ended]) -> None:
    with scripted(**QUICK, api_key="secret") as url:
        assert here(url, *SMALL, "--api-key", "secret").status == 0


def test_a_second_server_that_is_not_there_keeps_the_first(here: Callable[..., Ended], tmp_path: Path) -> None:
    with scripted() as gone:
        pass
    with law_server() as url:
        ended = here(url, "--compare", gone, *SMALL, "--json", str(tmp_path / "s.json"))
    assert ended.status == 1
    assert "no connection" in ended.err.splitlines()[-1]
    assert "A: While the prompt was prefilled" in ended.out
    assert len(json.loads((tmp_path / "s.json").read_text())["servers"]) == 1


@pytest.mark.parametrize(
    ("dies_after", "what"),
    [
        (1, "the warm-up with a prompt of 200 tokens failed after 0 good ones"),
        (2, "request alone-200-0 failed after 1 good one"),
    ],
)
def test_a_server_that_goes_away_before_any_stream_is_said_to_be_gone(
    here: Callable[..., Ended], dies_after: int, what: str
) -> None:
    with scripted(**QUICK, dies_after=dies_after) as url:
        ended = here(url, *SMALL)
    assert ended.status == 1
    assert ended.err.splitlines()[-1].startswith(f"biphase: {what}, and the server is gone: {url}/v1/completions: ")
    assert ended.out.startswith("2 streams were to decode while a prompt of 200 tokens arrives\n")


def test_a_refusal_is_no_server_that_is_gone(here: Callable[..., Ended]) -> None:
    with scripted(**QUICK, cut_after=1) as url:
        ended = here(url, *SMALL)
    assert ended.status == 1
    assert "is gone" not in ended.err


def test_a_server_that_dies_midway_leaves_a_table_and_files(here: Callable[..., Ended], tmp_path: Path) -> None:
    """Quiet streams, warm-up and one repeat have gone through when it ends."""
    with slot_server(slots=8, first_s=0.01, gap_s=0.004, dies_after=14) as url:
        ended = here(url, "--victims", "2", "--prompt", "200", "--repeats", "9", "--json", str(tmp_path / "s.json"))
    assert ended.status == 1
    assert ended.err.splitlines()[-1].startswith("biphase: request ")
    assert "Traceback" not in ended.err
    result = json.loads((tmp_path / "s.json").read_text())
    assert result["servers"][0]["attacks"] >= 1
    assert result["error"] is not None
    assert "quiet ITL ms" in ended.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(number: signal.Signals, tmp_path: Path) -> None:
    """After the first repeat; the table and the file are there, the status is 128 + the signal."""
    records, result = tmp_path / "s.jsonl", tmp_path / "s.json"
    words = ("--victims", "2", "--prompt", "300", "--repeats", "500", "--json", str(result), "--records", str(records))
    with law_server() as url:
        pipe = subprocess.PIPE
        with subprocess.Popen(command(url, *words), stdout=pipe, stderr=pipe, text=True) as process:
            deadline = time.monotonic() + 60
            while not records.exists() or "attack-2/" not in records.read_text():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "incomplete: interrupted" in out
    assert json.loads(result.read_text())["servers"][0]["attacks"] >= 1
