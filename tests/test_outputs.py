"""What a command writes, and what it says when it cannot."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from biphase.cli.outputs import check_outputs, check_writable, deliver, write_output
from biphase.client.record import Record, open_records
from biphase.errors import BadInput, RunFailed
from tests.analysis.engine_pages import PAGES
from tests.analysis.exposition import texts
from tests.in_process import biphase, biphase_into
from tests.metrics_server import metrics_server, pages
from tests.scripted_server import scripted

FULL = Path("/dev/full")
NO_SPACE = "biphase: cannot write to standard output: No space left on device"
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def test_a_check_leaves_no_file_and_harms_none(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("kept")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    with pytest.raises(BadInput, match="No such file or directory"):
        check_writable(tmp_path / "nowhere" / "x.json")
    with pytest.raises(BadInput, match="Is a directory"):
        check_writable(tmp_path)


@needs_full
def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(RunFailed, match="cannot write /dev/full: No space left on device"):
        write_output(FULL, "x")


@needs_full
def test_records_on_a_full_disk_fail_once_and_let_the_run_end() -> None:
    record = Record(id="r", intended=0, sent=0)
    with open_records(FULL) as keep:
        with pytest.raises(RunFailed, match="cannot write records to /dev/full: No space left"):
            keep(record)
        keep(record)


def through(words: Sequence[str], stdout: str, stderr: str = "") -> tuple[int, str]:
    """Status and stderr of a command whose stdout is a file, or a pipe that nobody reads."""
    command = shlex.join([sys.executable, "-m", "biphase", *words])
    into = f">{stdout}" if stdout else "| true"
    script = f"set -o pipefail; {command} {stderr} {into}"
    done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are measured four times for the sake of their laws, of which nothing is asked here."""
    monkeypatch.setattr("biphase.experiments.profile.ROUNDS", 1)


@contextmanager
def a_run_of_each(folder: Path) -> Iterator[list[list[str]]]:
    """Commands that end with a table, without their files."""
    before, after = texts("python", PAGES["vllm new"].metrics)
    (folder / "a").write_text(before)
    (folder / "b").write_text(after)
    quick = ["--lengths", "4", "--tokens", "3", "--repeats", "2"]
    with scripted(first_token_s=0.001, gap_s=0.001) as url, metrics_server(pages(before, after)) as metrics:
        assert not biphase("profile", url, *quick, "--json", str(folder / "p")).returncode
        yield [
            ["roofline", "llama-3.1-8b"],
            ["split", "--from", str(folder / "a"), str(folder / "b")],
            ["split", metrics, "--for", "300ms", "--every", "100ms"],
            ["split", metrics, "--watch", "--for", "1s", "--every", "100ms"],
            ["profile", url, *quick],
            ["bench", url, "--requests", "4", "--concurrency", "2", "--duration", "5", "--warmup", "0"],
            ["compare", str(folder / "p"), str(folder / "p")],
        ]


@needs_full
def test_a_full_stdout_is_one_line_and_costs_no_file(tmp_path: Path) -> None:
    with a_run_of_each(tmp_path) as commands:
        for words in commands:
            target, said = tmp_path / "result.json", io.StringIO()
            with FULL.open("w") as full:
                status = biphase_into(full, said, *words, "--json", str(target))
            assert (status, said.getvalue().splitlines()[-1]) == (1, NO_SPACE)
            json.loads(target.read_text())
            target.unlink()
    target = tmp_path / "result.json"
    assert through(["roofline", "llama-3.1-8b", "--json", str(target)], "/dev/full") == (1, f"{NO_SPACE}\n")
    json.loads(target.read_text())


@contextmanager
def unread() -> Iterator[TextIO]:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:  # noqa: PTH123 - it has no path
        yield pipe


def test_a_pipe_that_nobody_reads_is_silent_and_costs_no_file(tmp_path: Path) -> None:
    with a_run_of_each(tmp_path) as commands:
        for words in commands:
            target = tmp_path / "result.json"
            with unread() as out, unread() as err:  # progress has no reader either
                assert biphase_into(out, err, *words, "--json", str(target)) == 1
            json.loads(target.read_text())
            target.unlink()
    target = tmp_path / "result.json"
    assert through(["roofline", "llama-3.1-8b", "--json", str(target)], "", "2>&1") == (1, "")
    json.loads(target.read_text())


@needs_full
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["stall", "--help"], []])
def test_help_to_a_full_stdout_is_one_line(words: list[str]) -> None:
    assert through(words, "/dev/full") == (1, f"{NO_SPACE}\n")
    assert through(words, "") == (1, "")


@needs_full
def test_a_full_stderr_changes_nothing_but_itself() -> None:
    assert through(["compare", "/nonexistent/a", "b"], "/dev/null", "2>/dev/full") == (2, "")
    assert through(["roofline", "llama-3.1-8b"], "/dev/null", "2>&-") == (0, "")
    assert through(["roofline", "llama-3.1-8b"], "&-") == (0, "")


def test_characters_that_a_terminal_lacks_are_question_marks() -> None:
    command = [sys.executable, "-m", "biphase", "roofline", "llama-3.1-8b"]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=plain)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_result_is_delivered_as_far_as_it_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table although the first file fails, the second file too; then the failure is raised."""
    with pytest.raises(RunFailed, match="cannot write"):
        deliver(lambda: print("table"), (tmp_path, lambda: "a"), (None, lambda: "b"), (tmp_path / "c", lambda: "c"))
    assert capsys.readouterr().out == "table\n"
    assert (tmp_path / "c").read_text() == "c"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["profle"], "No such command 'profle'"),
        (["profile", "--repeats", "x"], "'--repeats'"),
        (["profile", "--repeats", "99999999999999999999"], "--repeats"),
        (["profile", "--repeats", "10001"], "expected 1 to 10,000"),
        (["profile", "--tokens", "1"], "expected 2 to 1,000,000"),
        (["profile", "http://127.0.0.1:1", "--timeout", "nan"], "--timeout nan"),
        (["profile", "http://127.0.0.1:1", "--api-key", "k\n"], "control character"),
        (["profile", "http://127.0.0.1:1", "--header", "a b: c"], "expected 'Name: value'"),
        (["roofline", "llama-3.1-8b", "--json", "/nonexistent/x.json"], "cannot write to /nonexistent/x.json"),
        (["profile", "http://h", "--lengths", "99999999999999999999"], "1 or more and at most 16,777,216"),
        (["stall", "http://h", "--prompt", "99999999999999999999"], "--prompt 99999999999999999999: expected 1 to 1,0"),
        (["stall", "http://h", "--itl-slo", f"{'9' * 400}s"], "expected a time with its unit, 1us to 3600s"),
        (["bench", "http://h", "--rate", "1", "--slo", f"ttft={'9' * 400}s"], "from 1us to a million s"),
        (["serve", "nosuch", "--kv-cache-gb", "inf"], "--kv-cache-gb inf: expected 0.001 to 1,000,000"),
        (["serve", "nosuch", "--api-key", " "], "--api-key is empty: give a key, or leave the option out"),
        (["serve", "nosuch", "--itl-budget-ms", "1e300"], "--itl-budget-ms 1e+300: expected 0.001 to 2,678,400,000"),
        (["serve", "nosuch", "--drain-timeout", "inf"], "--drain-timeout inf: expected 0 to 2,678,400 seconds"),
        (["serve", "nosuch", "--health-timeout", "inf"], "--health-timeout inf: expected 1 to 2,678,400 seconds"),
        (["roofline", "llama-3.1-8b", "--dp", "99999999999999999999"], "--dp 99999999999999999999: expected 1 to 1,0"),
        (
            ["roofline", "llama-3.1-8b", *["--peak-tflops", "1e-300", "--bandwidth-tbps", "1", "--memory-gb", "1"]],
            "must be a positive finite number, 1e-06 to 1e+09",
        ),
        (["calibrate", "--output", "/nonexistent/x.toml"], "cannot write to /nonexistent/x.toml"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(words: list[str], line: str) -> None:
    done = biphase(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("biphase: ")
    assert done.stderr.count("\n") == 1
    assert line in done.stderr


def test_no_arguments_show_the_help() -> None:
    done = biphase()
    assert done.returncode == 0
    assert "profile" in done.stdout


def test_impatient_interrupts_lose_nothing(tmp_path: Path) -> None:
    """Three SIGINT while the built-in engine is measured: the table and the file are there, the status is 130."""
    command = [sys.executable, "-m", "biphase", "profile", "--lengths", "4", "--tokens", "50", "--repeats", "500"]
    command += ["--json", str(tmp_path / "r.json"), "--records", str(tmp_path / "r.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = 300
        while not (tmp_path / "r.jsonl").exists() or (tmp_path / "r.jsonl").read_text().count("\n") < 4:
            assert process.poll() is None
            deadline -= 1
            assert deadline, "the measurement did not begin"
            try:
                process.wait(timeout=0.3)
            except subprocess.TimeoutExpired:
                continue
        for _ in range(3):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "prefill ms" in out
    assert (tmp_path / "r.json").stat().st_size > 0


def test_two_options_never_name_the_same_file(tmp_path: Path) -> None:
    check_outputs(json=tmp_path / "a", html=tmp_path / "b", records=None)
    with pytest.raises(BadInput, match=r"--json and --html name the same file"):
        check_outputs(json=tmp_path / "a", html=tmp_path / "x" / ".." / "a")
    assert not list(tmp_path.iterdir())
