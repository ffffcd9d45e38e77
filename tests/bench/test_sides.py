"""A side's process: it answers, it stands still between questions, and its end is told in one line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from answering import Question
from biphase.errors import RunFailed
from sides import Worker

BENCH = Path(__file__).parents[2] / "bench"
ANSWERS = f"""
import sys; sys.path.insert(0, {str(BENCH)!r})
import threading
from answering import private_stdout, serve
out = private_stdout()
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
print("noise of a library")
serve(out, "a test", lambda line: {{"seconds": line["tokens"] / 10}})
"""


def cpu_ticks(pid: int) -> int:
    """User and system time of a process, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def all_stopped(pid: int) -> bool:
    """Every thread of a process is in state T."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rsplit(")", 1)[1].split()[0] == "T" for stat in stats)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_side_answers_and_uses_no_processor_between_questions() -> None:
    worker = Worker("x", [sys.executable, "-c", ANSWERS])
    pid = worker._process.pid
    try:
        assert worker.about == "a test"
        assert worker.ask(Question("prefill", 30)) == 3.0
        while not all_stopped(pid):  # the signal reaches a running thread at its next interrupt
            time.sleep(0.01)
        before = cpu_ticks(pid)
        time.sleep(0.3)
        assert cpu_ticks(pid) == before
        assert worker.ask(Question("prefill", 40)) == 4.0
    finally:
        worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_stopped_side_does_not_outlive_a_killed_parent() -> None:
    parent = f"""
import sys; sys.path.insert(0, {str(BENCH)!r})
from sides import Worker
print(Worker("x", [sys.executable, "-c", {ANSWERS!r}])._process.pid, flush=True)
import time; time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_the_end_of_a_side_is_told_with_its_last_line() -> None:
    with pytest.raises(RunFailed, match="x ended with status 3: no such model"):
        Worker("x", [sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"])
