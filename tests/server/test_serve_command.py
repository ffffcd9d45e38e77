"""``biphase serve`` as it is typed: with the default model, and when something is missing."""

import importlib.util
import json
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import Server, stop

from biphase.cli import serve
from biphase.engine.messages import Ready
from biphase.engine.text import Text, load_text
from biphase.errors import BadInput
from biphase.server.admission import ServedModel
from biphase.server.serving import Started

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"


@pytest.fixture(scope="module")
def default_model() -> Iterator[Server]:
    command = [
        sys.executable,
        "-m",
        "biphase",
        "serve",
        "--managed",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    pipe = subprocess.PIPE
    server = Server(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True), Path("unused"))
    yield server.wait_until_ready()
    stop(server)


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
        return json.load(response)


def test_greedy_answers_over_http_are_the_reference_s(default_model: Server) -> None:
    """float32 from the reference's own file gives the reference's greedy tokens, and their text."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    text, chat = cases[1], next(case for case in cases if case["messages"])
    answer = post(default_model.url + "/v1/completions", {"prompt": text["text"], "max_tokens": 10})
    assert len(answer["choices"][0]["text"]) > 20
    assert text["greedy_text"].startswith(answer["choices"][0]["text"])
    counts = {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    body = {"messages": chat["messages"], "max_tokens": 10, "model": "smollm2-135m"}
    answer = post(default_model.url + "/v1/chat/completions", body)
    content = answer["choices"][0]["message"]["content"]
    assert len(content) > 20
    assert chat["greedy_text"].startswith(content)
    assert answer["usage"]["prompt_tokens"] == len(chat["prompt_token_ids"])


def test_ctrl_c_ends_it_without_a_traceback(default_model: Server) -> None:
    default_model.process.send_signal(signal.SIGINT)
    status, stderr = default_model.ended()
    assert status == 130
    assert "Traceback" not in stderr


def test_a_missing_extra_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "starlette") else object())
    with pytest.raises(BadInput, match=r"needs starlette, torch; run: pip install 'biphase\[engine\]'"):
        serve._need_engine()


def test_a_pool_beyond_what_can_be_used_is_said(byte_text: Text, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests of 64 tokens use 32 blocks of 4, however many bytes were asked for."""
    started = Started(
        "http://h", ServedModel("tiny", byte_text, 64, 300), Ready(64, 300, "float32", "float32", 32, 4, 1.0), 2
    )
    serve._announce(started)
    line = "all that 2 such requests can use: a larger --kv-cache-gb would stay unused"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_the_announcement_ends_in_a_request_that_can_be_pasted(
    byte_text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_tokenizer: bool
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    text = byte_text if has_tokenizer else load_text(tmp_path)
    ready = Ready(64, 300, "float32", "float32", 16, 4, 1.25)
    serve._announce(Started("http://127.0.0.1:8000", ServedModel("tiny's", text, 64, 300), ready, 2))
    printed = capsys.readouterr().out
    assert "64 tokens (16 blocks of 4)" in printed
    assert "would stay unused" not in printed
    command = shlex.split(printed[printed.index("curl") : printed.index("\n\nCtrl-C")].replace("\\\n", ""))
    body = json.loads(command[command.index("-d") + 1])
    assert body["model"] == "tiny's"
    assert ("messages" in body) == has_tokenizer
    assert command[2].endswith("chat/completions" if has_tokenizer else "/v1/completions")
