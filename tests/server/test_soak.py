"""bench/soak.py for some seconds on a tiny model: the built-in engine under traffic, and killed in the middle of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import EOS, TEMPLATE, byte_tokenizer

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [EOS],
}

pytestmark = pytest.mark.timeout(400)  # 25 s where nothing else runs; a machine at a load of 30 took 90 s


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape for random weights whose tokens are bytes. 1 MB of KV cache holds 488 tokens of it."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def soak(model: Path, path: Path, minutes: float, *options: str) -> dict[str, Any]:
    size = ("--kv-cache-gb", "0.001", "--knowns", "15", "--answers", "30", "--clients", "16")
    time = ("--minutes", str(minutes), "--era-seconds", "4")
    command = [sys.executable, str(SOAK), "--model", str(model), "--random-weights", *size, *time, *options]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["wrong"] == []
    assert sum(outcomes.get("right", 0) for outcomes in report["outcomes"].values()) >= 20
    return report


def test_twenty_seconds_of_traffic_leave_nothing_wrong_and_nothing_behind(model: Path, tmp_path: Path) -> None:
    report = soak(model, tmp_path / "soak.json", 1 / 3)
    assert len(report["samples"]) == 5
    assert report["counters"]["vllm:num_preemptions_total"] > 0


@pytest.mark.parametrize(
    ("kill", "ends"),
    [
        ("engine", {"error event", "HTTP 500", "HTTP 503", "connection refused", "connection closed"}),
        ("server", {"stream closed without [DONE]", "connection closed", "connection refused"}),
        ("term", {"finish_reason abort", "HTTP 503", "connection refused", "connection closed"}),
    ],
)
def test_a_kill_in_the_middle_is_told_to_every_client_and_leaves_no_process(
    model: Path, tmp_path: Path, kill: str, ends: set[str]
) -> None:
    report = soak(model, tmp_path / "soak.json", 1 / 15, "--kill", kill)
    seen = {outcome for outcomes in report["outcomes"].values() for outcome in outcomes}
    assert seen - {"right", "HTTP 429"}
    assert seen - {"right", "HTTP 429"} <= ends
