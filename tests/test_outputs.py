"""What a command writes, and what it says when it cannot."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from biphase.cli.outputs import check_outputs, check_writable, write_output
from biphase.client.record import Record, open_records
from biphase.errors import BadInput, RunFailed

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def biphase(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "biphase", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


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
    command = [sys.executable, "-m", "biphase", "profile", "--lengths", "4", "--tokens", "200", "--repeats", "500"]
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
