"""``biphase bench`` as a user runs it: outputs, files, statuses, signals, wrong options."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphase.cli.main import app
from biphase.client.record import read_records
from biphase.errors import BadInput
from tests.in_process import biphase
from tests.slot_server import slot_server

QUICK: dict[str, Any] = {"slots": 8, "first_s": 0.01, "gap_s": 0.002}
WORKLOAD = '{"input_tokens": 30, "output_tokens": 4}\n{"input_tokens": 100, "output_tokens": 6}\n'


def wait_for(path: Path, holds: Callable[[bytes], bool]) -> None:
    """Until the file is there and what it holds is enough, a minute at most."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and holds(path.read_bytes())):
        time.sleep(0.05)


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "w.jsonl"
    path.write_text(WORKLOAD)
    return str(path)


def test_tables_on_stdout_and_all_files(tmp_path: Path, workload: str) -> None:
    names = [tmp_path / name for name in ("b.json", "b.html", "r.jsonl")]
    files = [
        word
        for option, path in zip(("--json", "--html", "--records"), names, strict=True)
        for word in (option, str(path))
    ]
    with slot_server(**QUICK, engine_seconds=True) as url:
        words = ("--workload", workload, "--rate", "20,40", "--duration", "1", "--warmup", "0.25")
        ended = biphase("bench", url, *words, "--slo", "ttft=1s,itl=500ms", "--price-per-hour", "2", *files)
    assert ended.returncode == 0, ended.stderr
    for heading in (
        "Levels of load",
        "Latencies under",
        "TTFT by uncached prompt length",
        "steady state",
        "engine-seconds",
    ):
        assert heading in ended.stdout
    assert max(map(len, ended.stdout.splitlines()[8:14])) <= 110
    result = json.loads(names[0].read_text())
    assert [level["load"]["level"] for level in result["bench"]["levels"]] == [20, 40]
    assert result["bench"]["levels"][0]["price"]["phase_time"]["source"] == "measured"
    assert {row["prompt_tokens"] for row in result["rows"]} == {32, 128}
    assert "TTFT by uncached prompt length" in names[1].read_text()
    records = list(read_records(names[2]))
    assert len(records) >= sum(level["measured"]["outcomes"]["due"] for level in result["bench"]["levels"])


def test_compare_takes_two_benches(tmp_path: Path, workload: str) -> None:
    for name, first_s in (("a", 0.02), ("b", 0.08)):
        with slot_server(slots=8, first_s=first_s, gap_s=0.002) as url:
            words = ("--workload", workload, "--rate", "24", "--arrivals", "constant", "--duration", "1")
            slo = ("--slo", "ttft=60ms")
            assert biphase("bench", url, *words, *slo, "--json", str(tmp_path / f"{name}.json")).returncode == 0
    named = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    compared = biphase("compare", *named, "--fail-if-worse", "50%", "--json", str(tmp_path / "c.json"))
    assert compared.returncode == 1
    assert "goodput under constant arrivals at 24 requests/s x 0.00" in compared.stderr
    levels = {level["name"]: level for level in json.loads((tmp_path / "c.json").read_text())["levels"]}
    assert levels["goodput"]["second"] == 0
    assert levels["attained"]["outcome"] == "worse"
    assert "prefill of 32 tokens" in compared.stderr
    assert "prefill of 128 tokens" in compared.stderr


def test_a_server_that_dies_midway_ends_with_status_1_and_its_table(tmp_path: Path, workload: str) -> None:
    with slot_server(**QUICK, dies_after=40) as url:
        words = ("--workload", workload, "--rate", "40", "--duration", "20", "--json", str(tmp_path / "b.json"))
        ended = biphase("bench", url, *words)
    assert ended.returncode == 1
    assert re.search(r"^biphase: the server is gone after \d+ good requests: ", ended.stderr, re.MULTILINE)
    assert "Traceback" not in ended.stderr
    assert "Levels of load" in ended.stdout
    assert json.loads((tmp_path / "b.json").read_text())["error"].startswith("the server is gone")


@pytest.mark.parametrize("more", [("--rate", "40"), ("--concurrency", "3"), ("--rate", "40", "--workers", "2")])
def test_ctrl_c_keeps_what_was_measured(more: tuple[str, ...], tmp_path: Path, workload: str) -> None:
    records = tmp_path / "r.jsonl"
    words = ("--workload", workload, "--duration", "60", "--json", str(tmp_path / "b.json"), "--records", str(records))
    with slot_server(**QUICK) as url:
        command = [sys.executable, "-m", "biphase", "bench", url, *words, *more, "--warmup", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_for(records, lambda content: content.count(b"\n") >= 20)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "incomplete: interrupted" in stdout
    assert "Traceback" not in stderr
    result = json.loads((tmp_path / "b.json").read_text())
    o = result["bench"]["levels"][0]["measured"]["outcomes"]
    assert o["completed"] >= 15
    assert o["unfinished"] == 0


def test_ctrl_c_in_a_search_keeps_the_evidence(tmp_path: Path, workload: str) -> None:
    records = tmp_path / "r.jsonl"
    words = ("--workload", workload, "--rate", "40", "--search", "--slo", "ttft=1s", "--duration", "0.6")
    with slot_server(**QUICK) as url:
        files = ("--json", str(tmp_path / "b.json"), "--records", str(records))
        command = [sys.executable, "-m", "biphase", "bench", url, *words, *files]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_for(records, lambda content: b'"level-2-' in content)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
    assert process.returncode == 130
    saturation = json.loads((tmp_path / "b.json").read_text())["bench"]["saturation"]
    assert saturation["ended"] == "interrupted"
    assert len(saturation["probes"]) >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workload", "chatty"), "neither a file nor one of chat"),
        (("--rate", "1", "--concurrency", "2"), "one kind of load at a time"),
        (("--rate", "0"), "--rate '0'"),
        (("--rate", "fast"), "--rate 'fast'"),
        (("--rate", "nan"), "--rate 'nan'"),
        (("--concurrency", "1.5"), "whole numbers"),
        (("--trace-speed", "2"), "have no time of arrival"),
        (("--burstiness", "0.5"), "--arrivals gamma"),
        (("--rate", "1", "--arrivals", "gamma", "--burstiness", "-1"), "--burstiness -1"),
        (("--slo", "ttft=5"), "--slo"),
        (("--slo", "ttft=5ms", "--slo-share", "0"), "--slo-share"),
        (("--slo", "ttft=5ms", "--slo-share", "0.95"), "at most 100, as in 95%"),
        (("--search", "--rate", "1"), "give one, as in --slo"),
        (("--search", "--slo", "ttft=5ms"), "--search begins at one --rate"),
        (("--search", "--slo", "ttft=5ms", "--rate", "1,2"), "--search begins at one --rate"),
        (("--duration", "0"), "--duration 0: expected 0.1 to 2,678,400 seconds"),
        (("--duration", "1e-12"), "--duration 1e-12: expected 0.1 to 2,678,400 seconds"),
        (("--duration", "nan"), "--duration nan: expected 0.1 to 2,678,400 seconds"),
        (("--duration", "1e300"), "--duration 1e+300: expected 0.1 to 2,678,400 seconds"),
        (("--seed", "-1"), "--seed -1: expected a whole number, 0 or more"),
        (("--rate", "1e300"), "--rate '1e300': expected a number more than 0 and at most 1,000,000"),
        (("--rate", "1,1e6", "--requests", "9999999"), "1 GiB at most): lower the rate, --duration or --requests"),
        (("--rate", "1e-3"), "Poisson arrivals at 0.001 requests/s: 0.054 requests are to be expected in the 60 s"),
        (("--rate", "0.1", "--duration", "12", "--warmup", "11"), "0.1 requests are to be expected in the 12 s"),
        (("--workload", "mooncake", "--trace-speed", "1e-6"), "0 requests are to be expected in the 60 s"),
        (("--trace-speed", ""), "--trace-speed: the requests of chat have no time of arrival"),
        (("--workload", "mooncake", "--trace-speed", ""), "--trace-speed ''"),
        (("--concurrency", ""), "--concurrency ''"),
        (("--rate", "1", "--arrivals", "gamma", "--burstiness", "1e-12"), "--burstiness 1e-12: expected 0.01 to 1,0"),
        (("--requests", "1"), "--requests 1: expected 2 to 10,000,000"),
        (("--requests", "99999999999999999999"), "--requests 99999999999999999999: expected 2 to 10,000,000"),
        (("--drain", "1e300"), "--drain 1e+300: expected 0 to 2,678,400 seconds"),
        (("--price-per-hour", "1e300"), "--price-per-hour 1e+300: expected 1e-06 to 1,000,000,000"),
        (("--timeout", "inf"), "--timeout inf: expected 0.001 to 2,678,400 seconds"),
        (("--duration", "5", "--warmup", "5"), "--warmup 5"),
        (("--drain", "-1"), "--drain -1"),
        (("--requests", "0"), "--requests 0"),
        (("--repeats", "2"), "an odd number"),
        (("--workers", "-1"), "--workers -1"),
        (("--price-per-hour", "0"), "--price-per-hour 0"),
        (("--laws", "x.json"), "add --price-per-hour"),
        (("--price-per-hour", "1", "--laws", "/nowhere.json"), "cannot read /nowhere.json"),
        (("--json", "/nowhere/b.json"), "cannot write to /nowhere/b.json"),
        (("--dtype", "bf16"), "is for the built-in engine"),
    ],
)
def test_wrong_options_are_one_line(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        app(["bench", "http://127.0.0.1:9", *words], standalone_mode=False)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nobody_there_is_one_line_and_status_1() -> None:
    ended = biphase("bench", "http://127.0.0.1:9", "--rate", "1")
    assert ended.returncode == 1
    assert "Connection refused" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
