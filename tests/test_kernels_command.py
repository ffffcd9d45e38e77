"""``biphase kernels`` from outside: what it prints, writes and refuses."""

import json
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from biphase.cli.main import app
from biphase.errors import BadInput
from tests.roofline.shapes import LLAMA

pytest.importorskip("numba")

from biphase.engine.crossover import timed

CONFIG = {**LLAMA, "vocab_size": 80, "max_position_embeddings": 600, "rms_norm_eps": 1e-5}


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["kernels", *words])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of no size; what is kept of it stays in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_run(config: str, tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    result = run(config, "--random-weights", "--rows", "1,20", "--repeats", "2", "--json", str(target))
    assert result.exit_code == 0, result.output
    assert "crossover  steps of" in result.stdout
    found = json.loads(target.read_text())["kernels"]
    assert found["repeats"] == 2
    assert found["roofs"]["read_gb_per_s"]["best"] > 0
    assert {line["operator"] for line in found["selection"]} >= {"linear, head"}
    rates = found["rates"]
    operators = ["decode step", "prefill step", "layers' products", "head", "decode attention", "chunk attention"]
    assert list(dict.fromkeys(rate["operator"] for rate in rates)) == operators
    for rate in rates:
        assert len(rate["samples_ms"]) == 2
        assert rate["read_gb_per_s"] == pytest.approx(rate["read_bytes"] / rate["ms"] / 1e6)
        assert rate["gop_per_s"] == pytest.approx(rate["operations"] / rate["ms"] / 1e6)
        assert rate["share_of_roof"] == pytest.approx(rate["roof_ms"] / rate["ms"])
    steps = [(rate["rows"], rate["program"]) for rate in rates if rate["operator"] == "decode step"]
    assert steps == [(1, "few rows"), (20, "few rows"), (20, "many rows")]
    chosen = {rate["rows"]: rate["program"] for rate in rates if rate["chosen"]}
    assert chosen == {1: "few rows", 20: "many rows" if found["crossover_rows"] <= 20 else "few rows"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rows", "0"], "--rows '0': expected whole numbers from 1 to 4,096, as in 1,8,64,512"),
        (["--rows", "1,x"], "--rows '1,x': expected whole numbers from 1 to 4,096, as in 1,8,64,512"),
        (["--rows", "4097"], "--rows '4097': expected whole numbers from 1 to 4,096, as in 1,8,64,512"),
        (["--repeats", "0"], "--repeats 0: expected 1 to 1,000"),
        (["--dtype", "float32"], "--dtype float32: expected one of auto, int8; others run in torch, with its kernels"),
        (["--activations", "int4"], "--activations int4: expected one of exact, int8"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: expected one of auto, int8"),
        (["--json", "/nowhere/x.json"], "cannot write to /nowhere/x.json: No such file or directory"),
        (["--threads", "100000"], "--threads 100000: expected 1 to "),
        (["no-such-model"], "no model 'no-such-model'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, BadInput), result.output
    assert str(result.exception).startswith(line)
    assert "\n" not in str(result.exception)


def test_what_is_not_there_is_said_before_anything_else() -> None:
    result = run("no-such-model")
    assert result.output == ""


@pytest.mark.parametrize(("compiled", "hint"), [(True, ""), (False, "; compiling kernels (up to three minutes")])
def test_that_kernels_are_compiled_is_said_when_they_are(
    compiled: bool, hint: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("biphase.engine.kernel_timing.kernels_are_compiled", lambda: compiled)
    result = run(config, "--random-weights", "--rows", "1", "--repeats", "1")
    assert result.stderr.splitlines()[0].startswith(f"loading {config}{hint}")
    assert ("compiling" in result.stderr) is not compiled


def interrupt_at(visit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT comes while a case is visited, the warm-up's visits counted."""
    visits = count(1)

    def timed_until(run: Callable[[], object]) -> float:
        if next(visits) == visit:
            signal.raise_signal(signal.SIGINT)
        return timed(run)

    monkeypatch.setattr("biphase.engine.kernel_timing.timed", timed_until)


def test_an_interrupt_keeps_what_was_measured(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "kernels.json"
    cases = 8  # steps, products and head of one row; attention of two shapes in each form, within 600 tokens
    interrupt_at(2 * cases + 3, monkeypatch)
    result = run(config, "--random-weights", "--rows", "1", "--repeats", "7", "--json", str(target))
    assert result.exit_code == 130, result.output
    assert "interrupted: the kernels below were visited 1 or 2 times of 7" in result.stdout
    found = json.loads(target.read_text())["kernels"]
    assert found["interrupted"]
    assert [len(rate["samples_ms"]) for rate in found["rates"]] == [2, 2, *[1] * (len(found["rates"]) - 2)]


def test_an_interrupt_before_anything_counts_says_nothing(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(1, monkeypatch)
    result = run(config, "--random-weights", "--rows", "1", "--repeats", "7")
    assert result.exit_code == 130, result.output
    assert result.stdout == ""


def test_a_head_size_that_torch_runs_is_refused(config: str) -> None:
    Path(config).write_text(json.dumps(CONFIG | {"head_dim": 24}))
    result = run(config, "--random-weights")
    assert isinstance(result.exception, BadInput)
    assert "runs in torch here" in str(result.exception)
