"""llama.cpp's side of bench/quality.py: what llama-perplexity saves, and llama-server on given tokens."""

import json
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from biphase.errors import RunFailed
from llama import last_line

MAGIC = b"_logits_"
HEADER = struct.Struct("<8sIii")
"""Of the file of ``--save-all-logits``: magic, n_ctx, n_vocab, n_chunk (perplexity.cpp, function perplexity)."""
START_LIMIT_S = 120.0
TOP = 64
"""Candidates asked of llama-server: the reference's five likeliest tokens are among them."""


@dataclass(frozen=True)
class Saved:
    """Tokens of each window [chunks, n_ctx], and log-probabilities of the second half's [chunks, n_ctx - n_ctx/2 - 1].

    The file keeps them in 16 bits over 16 nats below the likeliest token: steps of 0.00025, and nothing below.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float64]


def read_saved(path: Path) -> Saved:
    """The file that llama-perplexity saved; a token with log-probability below the kept range is at its lower end."""
    with path.open("rb") as stream:
        magic, n_ctx, n_vocab, chunks = HEADER.unpack(stream.read(HEADER.size))
    if magic != MAGIC:
        raise RunFailed(f"{path} is no file of llama-perplexity's log-probabilities")
    tokens = np.fromfile(path, np.int32, chunks * n_ctx, offset=HEADER.size).reshape(chunks, n_ctx)
    first, width = n_ctx // 2, 2 * ((n_vocab + 1) // 2) + 4
    shape = (chunks, n_ctx - 1 - first, width)
    rows = np.memmap(path, np.uint16, "r", offset=HEADER.size + tokens.nbytes, shape=shape)
    scale, least = (np.ascontiguousarray(rows[..., i : i + 2]).view(np.float32)[..., 0] for i in (0, 2))
    steps = np.take_along_axis(rows[..., 4:], tokens[:, first + 1 :, None].astype(np.int64), axis=2)[..., 0]
    return Saved(tokens, least.astype(np.float64) + scale.astype(np.float64) * steps)


def perplexity(programs: Path, gguf: Path, text: Path, windows: Sequence[Sequence[int]], threads: int) -> Saved:
    """llama-perplexity over the first windows of ``text``; RunFailed when it read other tokens than ``windows``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "saved"
        n_ctx = str(len(windows[0]))
        shape = ["-c", n_ctx, "-b", n_ctx, "--chunks", str(len(windows)), "-t", str(threads)]
        command = [str(programs / "llama-perplexity"), "-m", str(gguf), "-f", str(text), *shape]
        done = subprocess.run(
            [*command, "--save-all-logits", str(out)], capture_output=True, text=True, check=False
        )  # fmt: skip
        if done.returncode or not out.is_file():
            raise RunFailed(f"llama-perplexity ended with status {done.returncode}: {last_line(done.stderr)}")
        saved = read_saved(out)
    if saved.tokens.tolist() != [list(window) for window in windows]:
        raise RunFailed("llama-perplexity cut the text into other tokens than biphase's tokenizer")
    return saved


def golden(url: str, line: dict[str, Any]) -> dict[str, Any]:
    """As quality_worker.py, through /completion of the llama-server at ``url`` on token ids."""
    found: dict[str, Any] = {"likeliest": [], "first": []}
    for case in line["cases"]:
        prompt, output = case["prompt"], case["output"]
        answers = [ask(url, [*prompt, *output[:n]]) for n in range(len(output))]
        found["likeliest"].append([chosen(answer) for answer in answers])
        found["first"].append(candidates(answers[0]))
    return found


def ask(url: str, prompt: Sequence[int]) -> dict[str, Any]:
    """One greedy token after ``prompt``, with the likeliest candidates."""
    greedy = {"n_predict": 1, "temperature": 0.0, "cache_prompt": True}
    body = {"prompt": list(prompt), **greedy, "n_probs": TOP, "return_tokens": True}
    call = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=START_LIMIT_S) as reply:
        return dict(json.load(reply))


def chosen(answer: dict[str, Any]) -> int:
    """The greedy token; a piece of a character has no entry among the probabilities."""
    (token,) = answer["tokens"]
    return int(token)


def candidates(answer: dict[str, Any]) -> list[tuple[int, float]]:
    """(token, log-probability) of the candidates, likeliest first."""
    (place,) = answer["completion_probabilities"]
    pairs = [(int(top["id"]), float(top["logprob"])) for top in place["top_logprobs"]]
    return sorted(pairs, key=lambda pair: -pair[1])


@contextmanager
def running(programs: Path, gguf: Path, port: int, threads: int) -> Iterator[str]:
    """llama-server on a loopback port, for the length of the block."""
    url = f"http://127.0.0.1:{port}"
    command = [str(programs / "llama-server"), "-m", str(gguf), "--port", str(port), "-t", str(threads), "-np", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.05)
    raise RunFailed(f"llama-server was not healthy at {url} within {START_LIMIT_S:.0f} s")
