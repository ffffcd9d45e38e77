"""What is said of a profile, and the files that others read."""

import json

import pytest
from msgspec.structs import replace

from biphase.analysis.profile_result import Hardware
from biphase.report.files import json_bytes, markdown
from biphase.report.laws_text import law_lines, significant
from biphase.report.words import plain_words
from biphase.roofline.catalogue import load
from biphase.roofline.hardware import find_device
from tests.report.sample import sample_profile


def test_plain_words_say_what_one_user_gets_and_what_limits_it() -> None:
    """At 512 tokens: 30 + 51.2 + 0.5 = 81.7 ms, then 8.5 ms a token with 0.05 for the context: 117 tokens/s."""
    user, prefill, decode, help_ = plain_words(sample_profile(gpu=None))
    assert user.startswith("With a prompt of 512 tokens one user waits 82.")
    assert "117 tokens/s" in user
    assert "mostly work for each token (matrix products)" in prefill
    assert "weights and overhead" in decode
    assert "more requests at a time; 8 streams get" in help_


def test_with_hardware_the_floor_is_named() -> None:
    """Llama 3.1 8B on H100 reads 15.0 GB of weights and 0.27 GB of cache at 3.35 TB/s: 4.56 ms of 8.7."""
    words = " ".join(plain_words(sample_profile("h100")))
    assert "is at 52 % of what H100-SXM permits (4.56 ms to read weights and cache once)" in words
    assert "weights in half the bytes" in words or "less fixed overhead" in words


def test_a_floor_that_was_beaten_is_a_verdict_and_no_sentence() -> None:
    result = sample_profile("l40s")
    assert [v.name for v in result.verdicts] == ["faster-than-floor"]
    words = " ".join(plain_words(result))
    assert "permits" not in words
    assert "half the bytes" not in words


def test_nothing_measured_nothing_said() -> None:
    assert plain_words(replace(sample_profile(gpu=None), rows=())) == []


def test_laws_are_shown_with_intervals() -> None:
    lines = "\n".join(law_lines(sample_profile()))
    assert "prefill law, ms: 0.6 (HTTP) + " in lines
    assert "25 requests, 5 lengths" in lines
    assert "batches 1, 2, 4, 8" in lines
    assert "measured crossover:" in lines
    assert "ridge point 295 FLOP/B" in lines  # 989.4e12 / 3.35e12
    assert "where a step's ms go:" in lines


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1.18e-6, "1.18e-06"), (0.1234, "0.123"), (29.51, "29.5"), (1234.5, "1234")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_json_has_the_keys_of_vllms_bench_beside_its_own() -> None:
    found = json.loads(json_bytes(sample_profile()))
    assert found["median_ttft_ms"] == pytest.approx(found["rows"][2]["ttft_ms"]["median"])  # of 25, five a length
    assert found["median_itl_ms"] == pytest.approx(found["itl_ms"]["median"])
    assert found["p99_itl_ms"] == pytest.approx(found["itl_ms"]["p99"])
    assert found["mean_tpot_ms"] == pytest.approx(8.6, abs=0.1)
    assert found["total_input_tokens"] == 5 * (1 + 16 + 128 + 512 + 2048)
    assert found["total_output_tokens"] == 25 * 32
    assert found["output_throughput"] == pytest.approx(800 / found["duration"])
    assert "vllm_bench" not in found
    assert found["model_id"] == found["model"] == "scripted <model>"
    assert found["completed"] == 25
    assert found["prefill_law"]["b_ms_per_token"]["low"] <= 0.1 <= found["prefill_law"]["b_ms_per_token"]["high"]


def test_markdown_is_a_table() -> None:
    lines = markdown(sample_profile("l40s")).splitlines()
    head = lines.index("| prompt tokens | prefill ms | prefill tok/s | decode ms/token | decode tok/s |")
    assert all(line.count("|") == 6 for line in lines[head : head + 7])
    assert lines[head + 2].startswith("| 1 | ")
    assert any(line.startswith("> **faster-than-floor**") for line in lines)
    assert lines[-1] == "- `biphase profile http://127.0.0.1:8000 --header ...`"


def test_parts_of_a_step_sum_to_the_step() -> None:
    comparison = sample_profile().comparison
    assert comparison is not None
    assert sum(part.ms for part in comparison.parts) == pytest.approx(comparison.decode_measured_ms)
    assert comparison.decode_floor_ms == pytest.approx(4.56, abs=0.01)


def test_the_network_has_a_row_of_a_step() -> None:
    """What the client's mean ITL has beyond the server's is taken from the fixed part; unknown, it is in no gap."""
    base = sample_profile()
    hardware = Hardware(load("llama-3.1-8b"), find_device("h100-sxm"))
    alone = hardware.compare(base.prefill_law, base.decode_law, [512])
    shared = hardware.compare(base.prefill_law, base.decode_law, [512], network_itl_ms=0.25)
    assert (alone.parts[-1].name, alone.parts[-1].ms, alone.parts[-1].source) == ("network and HTTP", 0.0, "cancels")
    assert (shared.parts[-1].ms, shared.parts[-1].source) == (0.25, "difference")
    assert alone.parts[1].ms - shared.parts[1].ms == pytest.approx(0.25)
    assert sum(part.ms for part in shared.parts) == pytest.approx(shared.decode_measured_ms)
