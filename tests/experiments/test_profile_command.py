"""``biphase profile`` against scripted servers, as a user runs it: outputs, files, statuses, signals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from biphase.analysis.profile_result import ProfileResult
from biphase.client.record import read_records
from tests.in_process import biphase
from tests.scripted_server import scripted

QUICK = {"first_token_s": 0.002, "gap_s": 0.001}


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are measured four times for the sake of their laws, of which nothing is asked here."""
    monkeypatch.setattr("biphase.experiments.profile.ROUNDS", 1)


def profile(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return biphase("profile", *words, **environment)


SHORT = ("--lengths", "2,8", "--tokens", "3", "--repeats", "2")


def test_table_on_stdout_progress_on_stderr_and_both_files(tmp_path: Path) -> None:
    with scripted(**QUICK) as url:
        ended = profile(url, *SHORT, "--json", str(tmp_path / "p.json"), "--records", str(tmp_path / "r.jsonl"))
    assert ended.returncode == 0
    assert "prompt tokens" in ended.stdout
    assert "scripted at http://" in ended.stdout
    assert "prompt tokens" not in ended.stderr
    result: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    assert set(result) >= set(ProfileResult.__struct_fields__) - {"vllm_bench"}
    assert [row["prompt_tokens"] for row in result["rows"]] == [2, 8]
    assert result["rows"][0]["ttft_ms"]["n"] == 2
    assert result["error"] is None
    kept = len(list(read_records(tmp_path / "r.jsonl")))
    assert kept >= 2 + 4 + (2 + 4 + 8)  # warm-ups, lone requests, a round of batches; more rounds where time is left


def test_the_key_comes_from_the_environment() -> None:
    with scripted(**QUICK, api_key="secret") as url:
        assert profile(url, *SHORT, BIPHASE_API_KEY="secret").returncode == 0
        assert profile(url, *SHORT, OPENAI_API_KEY="secret").returncode == 0
        assert profile(url, *SHORT, "--header", "Authorization: Bearer secret").returncode == 0
        refused = profile(url, *SHORT)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("set BIPHASE_API_KEY or pass --api-key")


@pytest.mark.parametrize(
    ("script", "timeout", "line"),
    [
        ({"completions": False, "chat": False}, "20", "HTTP 404"),
        ({"status": 500}, "20", "HTTP 500: scripted refusal"),
        ({"silent": True}, "0.2", "no answer within the time limit; a longer one: --timeout SECONDS"),
    ],
)
def test_a_failure_is_one_line_and_status_1(script: dict[str, Any], timeout: str, line: str) -> None:
    with scripted(**QUICK, **script) as url:
        ended = profile(url, *SHORT, "--timeout", timeout)
    assert ended.returncode == 1
    errors = [found for found in ended.stderr.splitlines() if found.startswith("biphase: ")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in ended.stderr


def test_nobody_listens_there() -> None:
    with scripted() as url:
        pass
    ended = profile(url, *SHORT)
    assert ended.returncode == 1
    assert "no connection (Connection refused); is the server running, and is the port right?" in ended.stderr


def test_a_server_that_dies_leaves_table_json_and_records(tmp_path: Path) -> None:
    with scripted(**QUICK, dies_after=7) as url:
        words = ("--json", str(tmp_path / "p.json"), "--records", str(tmp_path / "r.jsonl"))
        ended = profile(url, "--lengths", "2,8", "--tokens", "3", "--repeats", "6", *words)
    assert ended.returncode == 1
    assert "failed after 4 good ones" in ended.stderr.splitlines()[-1]
    assert "prompt tokens" in ended.stdout
    assert "failed after 4 good ones" in json.loads((tmp_path / "p.json").read_text())["error"]
    assert len(list(read_records(tmp_path / "r.jsonl"))) == 2 + 4 + 1


@pytest.mark.parametrize(
    ("number", "status", "background"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
)
def test_a_signal_keeps_what_was_measured(
    number: signal.Signals, status: int, background: bool, tmp_path: Path
) -> None:
    """Also in the background of a script, where the shell has SIGINT ignored."""
    path, output = tmp_path / "r.jsonl", tmp_path / "p.json"
    with scripted(first_token_s=0.05, gap_s=0.001) as url:
        words = [url, "--lengths", "2", "--tokens", "3", "--repeats", "1000"]
        files = ["--records", str(path), "--json", str(output)]
        ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if background else []
        command = [sys.executable, "-m", "biphase", "profile", *words, *files]
        running = subprocess.Popen([*ignoring, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < 5):
            time.sleep(0.05)
        running.send_signal(number)
        out, err = running.communicate(timeout=20)
    assert running.returncode == status
    assert "Traceback" not in err
    assert "prompt tokens" in out
    kept = json.loads(output.read_text())
    assert kept["error"] == "interrupted"
    assert kept["rows"][0]["requests"] >= 3


def test_records_are_analysed_again_to_the_same_numbers(tmp_path: Path) -> None:
    records, first, second = (tmp_path / name for name in ("r.jsonl", "a.json", "b.json"))
    words = ("--lengths", "2,8,64", "--tokens", "6", "--repeats", "3")
    with scripted(**QUICK, usage="continuous") as url:
        assert profile(url, *words, "--records", str(records), "--json", str(first)).returncode == 0
    page, note = tmp_path / "r.html", tmp_path / "r.md"
    files = ("--json", str(second), "--html", str(page), "--markdown", str(note))
    ended = profile("--from-records", str(records), *files)
    assert ended.returncode == 0
    assert json.loads(first.read_text()) == json.loads(second.read_text())
    assert page.read_text().startswith("<!doctype html>")
    assert "| prompt tokens |" in note.read_text()
    assert len(json.loads(second.read_text())["decode_law"]["batches"]) > 1


def test_the_command_that_is_kept_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with scripted(**QUICK, api_key="hush") as url:
        secret = ("--api-key", "hush", "--header", "X-Token: hush", "--header=X-More: hush")
        assert profile(url, *SHORT, *secret, "--json", str(path)).returncode == 0
    assert "hush" not in path.read_text()
    assert "--api-key ... --header ... --header=..." in json.loads(path.read_text())["command"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--from-records", "/nowhere/r.jsonl"), "cannot read records from /nowhere/r.jsonl: No such file"),
        (("http://h", "--from-records", "r.jsonl"), "--from-records measures nothing: leave the URL"),
        (("http://h", "--gpu", "h100"), "needs both --model-config and --gpu; --model-config is missing"),
        (("http://h", "--ca", "/nowhere/ca.pem"), "--ca /nowhere/ca.pem: No such file"),
        (("http://h", "--html", "/nowhere/r.html"), "cannot write to /nowhere/r.html: No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: tuple[str, ...], line: str) -> None:
    ended = profile(*words)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_compare_fails_ci_when_the_second_is_slower(tmp_path: Path) -> None:
    for name, gap in (("a", 0.004), ("b", 0.012)):
        with scripted(first_token_s=0.002, gap_s=gap) as url:
            words = ("--lengths", "4", "--tokens", "6", "--repeats", "5", "--json", str(tmp_path / f"{name}.json"))
            assert profile(url, *words).returncode == 0

    def compare(*words: str) -> "subprocess.CompletedProcess[str]":
        return biphase("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *words)

    slower = compare("--fail-if-worse", "5%", "--json", str(tmp_path / "c.json"))
    assert slower.returncode == 1
    assert "biphase: worse by more than 5%: " in slower.stderr
    assert "decode of 4 tokens x" in slower.stderr
    found = {d["name"]: d for d in json.loads((tmp_path / "c.json").read_text())["differences"]}
    assert found["decode"]["outcome"] == "worse"
    assert compare("--fail-if-worse", "1000%").returncode == 0
    assert compare("--fail-if-worse", "x").returncode == 2
