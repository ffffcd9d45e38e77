"""``biphase roofline`` and ``biphase calibrate`` from outside: what they print, write and refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from biphase.cli.main import app
from biphase.errors import BadInput, BiphaseError
from tests.roofline.shapes import LLAMA

BASE = ["roofline"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*BASE, *arguments])


def refused(*arguments: str) -> str:
    """The one line that a user would see."""
    result = run(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    line = str(result.exception)
    assert "\n" not in line
    return line


def sheets(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "out.json"
    result = run(*arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(path.read_text())["sheets"]
    return found


def test_one_screen_answers_the_questions() -> None:
    output = run("llama-3.1-8b", "--gpu", "h100").output
    for part in (
        "8,030,261,248 parameters",
        "fit      yes",
        "compute-bound from 318 tokens",
        "decode floor  4.48 ms",
        "fewer bytes",
        "more GPUs",
        "more tokens per read",
        "more users per read",
        "summarisation",
    ):
        assert part in output
    assert len(output.splitlines()) < 60


def test_json_carries_units_and_the_same_numbers(tmp_path: Path) -> None:
    (sheet,) = sheets(tmp_path, "llama-3.1-8b", "--prompt", "2048", "--batch", "32")
    assert sheet["model"]["parameters"] == 8_030_261_248
    assert sheet["crossover_prompt_tokens"] == 318
    prefill, decode = sheet["phases"][0], sheet["phases"][1]
    assert (prefill["phase"], prefill["efficiency"]) == ("prefill", "ideal")
    assert prefill["flops"] == pytest.approx(2.968840e13, rel=1e-6)
    assert decode["step_ms"] == pytest.approx(7.05, abs=0.01)
    assert decode["tokens_per_s"] == pytest.approx(32 / decode["step_ms"] * 1e3)
    assert sheet["fits"] is True
    assert sheet["phases"][2]["efficiency"] == "measured"


def test_several_models_and_devices_make_a_table(tmp_path: Path) -> None:
    output = run("llama-3.1-8b", "qwen3-8b", "--gpu", "h100,l4").output
    assert output.count("H100-SXM") >= 2
    assert len(sheets(tmp_path, "llama-3.1-8b", "qwen3-8b", "--gpu", "h100,l4")) == 4


def test_every_shipped_model_runs_on_every_device_with_a_peak(tmp_path: Path) -> None:
    from biphase.roofline.catalogue import shipped

    gpus = "h100,v100,m2ultra,mi300x,tpuv5e,b200"
    found = sheets(tmp_path, *shipped(), "--gpu", gpus, "--prompt", "300")
    assert len(found) == 6 * len(shipped())
    assert all(row["step_ms"] > 0 for sheet in found for row in sheet["phases"])


def test_models_by_path_folder_and_alias(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = tmp_path / "mine" / "config.json"
    config.write_text(json.dumps(LLAMA))
    for name in (str(config), str(tmp_path / "mine")):
        assert sheets(tmp_path, name)[0]["model"]["name"] == "mine"
    assert sheets(tmp_path, "smollm2-135m")[0]["model"]["parameters"] == 134_515_008
    assert sheets(tmp_path, "meta-llama/Llama-3.1-8B")[0]["model"]["name"] == "llama-3.1-8b"


def test_dtypes_change_bytes_and_fit(tmp_path: Path) -> None:
    plain = sheets(tmp_path, "llama-3.1-70b")[0]
    small = sheets(tmp_path, "llama-3.1-70b", "--dtype", "int4", "--kv-dtype", "fp8")[0]
    assert (plain["fits"], plain["smallest_tp_that_fits"], small["fits"]) == (False, 2, True)
    assert small["model"]["kv_bytes_per_token"] == plain["model"]["kv_bytes_per_token"] / 2


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    own = ("--peak-tflops", "990", "--bandwidth-tbps", "3.35", "--memory-gb", "80")
    assert sheets(tmp_path, "llama-3.1-8b", *own)[0]["device"]["name"] == "custom"
    assert "needs all three" in refused("llama-3.1-8b", "--peak-tflops", "990")


def test_bad_names_and_numbers() -> None:
    assert "did you mean llama-3.1-8b" in refused("llama-3.1-8")
    assert "did you mean H100-SXM" in refused("llama-3.1-8b", "--gpu", "h10")
    assert "--gpu is empty" in refused("llama-3.1-8b", "--gpu", " ,")
    assert "unknown weight dtype" in refused("llama-3.1-8b", "--dtype", "int3")
    assert "unknown KV dtype" in refused("llama-3.1-8b", "--kv-dtype", "q4")
    assert "fp8_ds_mla" in refused("llama-3.1-8b", "--kv-dtype", "fp8_ds_mla")
    assert "unknown engine" in refused("llama-3.1-8b", "--engine", "mine")
    assert "tp 3 does not divide" in refused("llama-3.1-8b", "--tp", "3")
    assert "no known link" in refused("llama-3.1-8b", "--tp", "2", "--gpu", "m2 ultra")
    assert "no tabulated peak" in refused("llama-3.1-8b", "--gpu", "genoa")
    assert "at most 16,777,216 tokens" in refused("llama-3.1-8b", "--prompt", "999999999")
    assert "leave --dtype away" in refused("smollm2-135m", "--dtype", "fp8")
    zero = ("--peak-tflops", "990", "--bandwidth-tbps", "0", "--memory-gb", "80")
    said = "bandwidth_tbps must be a positive finite number, 1e-06 to 1e+09, found 0.0"
    assert said in refused("llama-3.1-8b", *zero)
    for option in ("--prompt", "--batch", "--context", "--tp", "--kv-blocks"):
        assert run("llama-3.1-8b", option, "-1").exit_code == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1, 2]", "holds a JSON list; a config.json is an object"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "is not text"),
        (b"[" * 100_000, "nested too deep"),
        (b"{}", "no model config"),
        (b'{"num_hidden_layers": NaN, "model_type": "llama"}', "num_hidden_layers must be a whole number, found nan"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert says in refused(str(path))


def test_two_gigabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as stream:
        stream.truncate(2 * 10**9)  # sparse: takes no disk
    assert "has 2,000 MB and was not read" in refused(str(path))


def test_errors_reach_a_user_as_one_line_and_exit_2() -> None:
    command = [sys.executable, "-m", "biphase", "roofline", "llama-3.1-8b", "--gpu", "h10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("biphase: no device 'h10'")
    assert done.stderr.count("\n") == 1


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['biphase', 'roofline', 'llama-3.1-8b']; sys.modules['torch'] = None\n"
    code += "from biphase.cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    result = run("llama-3.1-8b", "--json", str(tmp_path / "no" / "out.json"))
    assert isinstance(result.exception, BiphaseError)
    assert "cannot write" in str(result.exception)


def test_calibrate_refuses_before_it_measures(tmp_path: Path) -> None:
    runner = CliRunner()
    wrong = runner.invoke(app, ["calibrate", "--output", str(tmp_path / "local.json")])
    assert "must end in .toml" in str(wrong.exception)
    unknown = runner.invoke(app, ["calibrate", "--device", "tpu", "--output", str(tmp_path / "x.toml")])
    assert "unknown device 'tpu'" in str(unknown.exception)


def test_local_without_calibration_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "XDG_CONFIG_HOME", str(tmp_path))
    assert "run `biphase calibrate` first" in refused("llama-3.1-8b", "--gpu", "local")
