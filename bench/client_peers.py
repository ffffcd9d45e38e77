"""The same load by other clients: vllm bench serve, guidellm and aiperf, each from a virtual environment of its own."""

import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

LIMIT_S = 600

Written = list[tuple[int | None, float, list[float]]]


@dataclass(frozen=True)
class Load:
    """Streams at once, chunks a second over all of them, tokens of each."""

    streams: int
    rate: float
    tokens: int


@dataclass(frozen=True)
class Reported:
    """What a tool says, in ms: median and 99th percentile of TTFT and ITL."""

    ttft: tuple[float, float]
    itl: tuple[float, float]


@dataclass(frozen=True)
class Peer:
    """A tool: its program in the folder of environments, its arguments, and how its file is read.

    ``means``: its ITL is one number for each request, the mean. ``offline``: it may be told that Hugging Face's hub is
    out of reach; aiperf then finds no folder either.
    """

    name: str
    program: str
    arguments: Callable[[str, Load, Path, Path], Sequence[str]]
    file: str
    read: Callable[[Any], Reported]
    means: bool = False
    offline: bool = True


def _vllm_arguments(url: str, load: Load, tokenizer: Path, folder: Path) -> Sequence[str]:
    server = ["bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    data = ["--model", "m", "--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "8"]
    size = ["--random-output-len", str(load.tokens), "--num-prompts", str(load.streams), "--ignore-eos"]
    out = ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "99", "--save-result"]
    return [*server, *data, *size, *out, "--result-dir", str(folder), "--result-filename", "vllm.json"]


def _vllm_read(found: Any) -> Reported:
    return Reported((found["median_ttft_ms"], found["p99_ttft_ms"]), (found["median_itl_ms"], found["p99_itl_ms"]))


def _guidellm_arguments(url: str, load: Load, tokenizer: Path, folder: Path) -> Sequence[str]:
    data = msgspec.json.encode({"prompt_tokens": 8, "output_tokens": load.tokens}).decode()
    streams = str(float(load.streams))  # 0.2 asks the number whether it is whole, which an int cannot say before 3.12
    kind = ["--rate-type", "concurrent", "--rate", streams, "--max-requests", str(load.streams)]
    out = ["--output-path", str(folder / "guidellm.json"), "--disable-progress", "--disable-console-outputs"]
    return ["benchmark", "--target", url, "--model", "m", "--processor", str(tokenizer), "--data", data, *kind, *out]


def _guidellm_read(found: Any) -> Reported:
    metrics = found["benchmarks"][0]["metrics"]

    def pair(name: str) -> tuple[float, float]:
        values = metrics[name]["successful"]
        return values["median"], values["percentiles"]["p99"]

    return Reported(pair("time_to_first_token_ms"), pair("inter_token_latency_ms"))


def _aiperf_arguments(url: str, load: Load, tokenizer: Path, folder: Path) -> Sequence[str]:
    server = ["profile", "-m", "m", "-u", url, "--endpoint-type", "completions", "--streaming"]
    size = ["--concurrency", str(load.streams), "--request-count", str(load.streams), "--isl", "8"]
    answer = ["--osl", str(load.tokens), "--tokenizer", str(tokenizer), "--use-server-token-count", "--ui", "none"]
    return [*server, *size, *answer, "--artifact-dir", str(folder)]


def _aiperf_read(found: Any) -> Reported:
    def pair(name: str) -> tuple[float, float]:
        return found[name]["p50"], found[name]["p99"]

    return Reported(pair("time_to_first_token"), pair("inter_token_latency"))


PEERS = (
    Peer("vllm bench serve", "vllm/bin/vllm", _vllm_arguments, "vllm.json", _vllm_read),
    Peer("guidellm", "guidellm/bin/guidellm", _guidellm_arguments, "guidellm.json", _guidellm_read, means=True),
    Peer(
        "aiperf",
        "aiperf/bin/aiperf",
        _aiperf_arguments,
        "profile_export_aiperf.json",
        _aiperf_read,
        means=True,
        offline=False,
    ),
)


def peer_row(
    peer: Peer, url: str, load: Load, environments: Path, tokenizer: Path | None, written: Callable[[], Written]
) -> str:
    """One line: chunks a second, CPU with the start of the tool, TTFT and ITL beside those of the server's writes."""
    program = environments / peer.program
    if not program.is_file():
        return f"{peer.name:16s}  not run: there is no {program}"
    if tokenizer is None:
        return f"{peer.name:16s}  not run: it needs --tokenizer"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        problem = _run(program, peer.arguments(url, load, tokenizer, folder), peer.offline)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        file = next(folder.rglob(peer.file), None)
        if problem or file is None:
            return f"{peer.name:16s}  failed: {problem or 'it wrote no result'}"
        reported = peer.read(msgspec.json.decode(file.read_bytes()))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    whole = [request for request in written() if len(request[2]) == load.tokens]  # guidellm begins more and drops them
    if not whole:
        return f"{peer.name:16s}  failed: no request was answered whole"
    return row(peer.name, reported, whole[-load.streams :], cpu, peer.means)


def _run(program: Path, arguments: Sequence[str], offline: bool) -> str | None:
    """What went wrong, in one line."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"} | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    path = f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [str(program), *arguments]
    environment = {**os.environ, **quiet, "PATH": path}
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S} s"
    return None if ended.returncode == 0 else f"status {ended.returncode}: {_reason(ended.stdout + ended.stderr)}"


def _reason(said: str) -> str:
    """The last line that begins with the name of an exception, as a traceback ends; else the last of all."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines or ["nothing said"])[-1]


def row(name: str, reported: Reported, requests: Written, cpu: float, means: bool = False) -> str:
    """One line: what a tool says beside what the server wrote for the same requests."""
    firsts = [1e3 * (moments[0] - read) for _, read, moments in requests]
    gaps = [1e3 * np.diff(moments) for _, _, moments in requests]
    itls = [gap.mean() for gap in gaps] if means else np.concatenate(gaps)
    sent = np.concatenate([moments for _, _, moments in requests])
    rate = (sent.size - 1) / float(np.ptp(sent))
    values = [
        f"{told:8.2f} ({np.percentile(true, q):.2f})"
        for pair, true in ((reported.ttft, firsts), (reported.itl, itls))
        for told, q in zip(pair, (50, 99), strict=True)
    ]
    note = "  ITL: mean of each request" if means else ""
    return f"{name:16s}  {rate:8,.0f}  {cpu:6.1f}  " + "  ".join(values) + note
