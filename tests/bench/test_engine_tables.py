"""bench/engine.py: options, rows, rates and what the table makes of them, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from answering import Question, prompt
from biphase.client.record import Chunk, Record
from biphase.errors import BadInput, RunFailed
from biphase.roofline.catalogue import load
from engine import ask_all, check, chosen, parse, shortened
from engine_worker import options
from machine import Machine, roof
from performance_table import best_peer, markdown, number, ratio_text, ratios
from serving import decode_rate, flags
from sides import ModelSet, Places, Side, engine_options, peer_side, peers, smollm2


def test_engine_options_of_a_side() -> None:
    assert engine_options("int8:activations=int8,dtype=bfloat16") == (
        "int8",
        {"activations": "int8", "dtype": "bfloat16"},
    )
    assert engine_options("exact") == ("exact", {})
    assert engine_options(":dtype=float32") == ("biphase", {"dtype": "float32"})
    with pytest.raises(BadInput, match="'fast' is no key=value"):
        engine_options("x:fast")


def test_worker_options_get_their_types() -> None:
    found = options(["model=smollm2-135m", "kv_cache_gb=0.5", "threads=2", "prefix_caching=false"])
    assert (found.model, found.kv_cache_gb, found.threads, found.prefix_caching) == ("smollm2-135m", 0.5, 2, False)
    with pytest.raises(BadInput, match="unknown field `speed`"):
        options(["model=m", "speed=high"])
    with pytest.raises(BadInput, match=r"Expected `int.*threads"):
        options(["model=m", "threads=many"])


def test_serve_flags_of_a_side() -> None:
    models = smollm2()
    assert flags("x:model=/m.gguf,dtype=float32,prefix_caching=false", models) == (
        "/m.gguf",
        ["--dtype", "float32", "--no-prefix-caching"],
    )
    assert flags("x", models) == (str(models.gguf), [])


def test_rows_come_in_the_order_of_the_table() -> None:
    assert chosen("start,prefill-512,decode-8") == ["decode-8", "prefill-512", "start"]
    with pytest.raises(BadInput, match="no row 'decode-9'"):
        chosen("decode-9")


class Scripted:
    """A side whose answers are given; None fails."""

    def __init__(self, name: str, *seconds: float | None) -> None:
        self.name, self.about = name, "scripted"
        self.closed = False
        self._seconds = iter(seconds)

    def ask(self, question: Question) -> float:
        answer = next(self._seconds)
        if answer is None:
            raise RunFailed("it ended")
        return answer

    def close(self) -> None:
        self.closed = True


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    """64 tokens in 9 (warm-up), 1 and 2 s."""
    sides: list[Side] = [Scripted("a", 9.0, 1.0, 2.0), Scripted("b", 9.0, 4.0, 8.0)]
    missing: list[str] = []
    found = ask_all(sides, ["decode-1"], 2, missing, Console(quiet=True))
    assert found == {"decode-1": {"a": [64.0, 32.0], "b": [16.0, 8.0]}}
    assert missing == []


def test_the_round_that_warms_up_asks_for_short_prompts() -> None:
    assert shortened(Question("prefill", 6000)) == Question("prefill", 512)
    assert shortened(Question("decode", 32, 1, 6000)) == Question("decode", 32, 1, 512)
    assert shortened(Question("decode", 64, 8, 32)) == Question("decode", 64, 8, 32)


def test_a_peer_that_fails_is_left_out_and_the_rest_goes_on() -> None:
    broken = Scripted("b", 1.0, None)
    sides: list[Side] = [Scripted("a", 1.0, 1.0, 1.0), broken]
    missing: list[str] = []
    found = ask_all(sides, ["decode-1"], 2, missing, Console(quiet=True))
    assert found == {"decode-1": {"a": [64.0, 64.0]}}
    assert missing == ["b failed at decode-1: it ended"]
    assert [side.name for side in sides] == ["a"]
    assert broken.closed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--engine", "a", "--engine", "a:dtype=float32"], "two sides of one name"),
        (["--repeats", "0"], "at least 1"),
        (["--json", "/nowhere/x.json"], "cannot write to /nowhere/x.json"),
        (["--into", "/nowhere/x.md"], "cannot read /nowhere/x.md"),
    ],
)
def test_what_would_fail_after_the_work_fails_before_it(words: list[str], reason: str) -> None:
    asked = parse(words)
    with pytest.raises(BadInput, match=reason):
        check(asked, asked.engine or ["biphase"], smollm2())


def test_prompts_differ_from_the_first_token() -> None:
    assert prompt(4, 7)[0] == 1007
    assert prompt(4, 8)[0] == 1008
    assert prompt(300, 7)[1:] == prompt(300, 8)[1:]


def stream(*times: float) -> Record:
    return Record(id="x", intended=0.0, sent=0.0, chunks=tuple(Chunk(t, 1, "text") for t in times))


def test_rate_is_over_the_time_in_which_all_streams_decode() -> None:
    """Both run from 2 to 5: 3 tokens of the first (3, 4, 5) and 2 of the second (3.5, 5) in 3 seconds."""
    assert decode_rate([stream(1, 2, 3, 4, 5, 6), stream(2, 3.5, 5)]) == pytest.approx(5 / 3)


def test_ratios_are_of_pairs_with_quartiles() -> None:
    """2, 3, 4, 5, 6: the quartiles are 3 and 5; a drift that slows both sides alike changes none."""
    pairs = ratios([20.0, 15.0, 4.0, 50.0, 12.0], [10.0, 5.0, 1.0, 10.0, 2.0])
    assert ratio_text(pairs) == "4.00 (3.00 to 5.00)"
    assert ratio_text([1.5]) == "1.50"
    assert ratio_text([3.0, 1.0]) == "2.00 (1.00 to 3.00)"


def test_the_best_peer_is_by_median_and_never_this_engine() -> None:
    found = {"biphase": [9.0] * 3, "a": [1.0, 5.0, 1.0], "b": [2.0, 2.0, 2.0]}
    assert best_peer(found, ["biphase"]) == "b"
    assert best_peer({"biphase": [1.0]}, ["biphase"]) is None


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.12345, 12.345, 1234.5)] == ["0.123", "12.3", "1,234"]


MACHINE = Machine("A machine, 2 cores", 2, 30e9, 40e9, {"bf16": 400e9, "int8": 800e9}, 0.5)


def test_roof_of_decode_is_its_bytes_over_the_bandwidth() -> None:
    """SmolLM2-135M by its published sizes: 30 layers of 576, heads 9/3 of 64, 1,536, vocabulary 49,152."""
    model = load(str(smollm2().gguf))
    found = roof(MACHINE, model, Question("decode", 63, 2, 32))
    weights = 30 * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536) + 576 * 49_152
    context = 32 + 32 + 1  # the middle of 63 tokens after 32, with itself
    assert found.flops == pytest.approx(2 * (2 * weights + 2 * 30 * 9 * 64 * 2 * context), rel=1e-3)
    kv = 2 * 30 * 2 * 3 * 64 * 2 * context
    assert found.bytes == pytest.approx(model.active_weight_bytes() + kv, rel=0.01)
    assert found.attention_flops == pytest.approx(2 * 2 * 30 * 9 * 64 * 2 * context)
    assert found.limits["exact"] == found.limits["int8"] == pytest.approx(2 * 40e9 / found.bytes)
    assert found.limits["float"] == pytest.approx(2 * 40e9 / (2 * weights + kv), rel=1e-3)


def test_the_faster_of_both_reads_is_the_roof() -> None:
    """A model beyond the caches may be read more slowly than calibration could: that sets no lower roof."""
    model, question = load(str(smollm2().gguf)), Question("decode", 63, 1, 32)
    slow = replace(MACHINE, bandwidth=60e9)
    assert roof(slow, model, question).limits["exact"] == pytest.approx(
        1.5 * roof(MACHINE, model, question).limits["exact"]
    )


def test_roof_of_prefill_is_its_operations_over_the_rate() -> None:
    model = load(str(smollm2().gguf))
    found = roof(MACHINE, model, Question("prefill", 512))
    attention = 30 * 9 * 64 * 4 * 512 * 513 / 2
    products = 2 * 512 * 30 * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536) + 2 * 576 * 49_152
    assert found.attention_flops == pytest.approx(attention)
    assert found.flops == pytest.approx(products + attention, rel=1e-3)
    assert found.limits["float"] == pytest.approx(512 / ((products + attention) / 400e9), rel=1e-3)
    floats = 400e9 / 3  # three products of bfloat16 words for one of float32, whose rate was not measured
    assert found.limits["exact"] == pytest.approx(512 / (2 * products / 800e9 + attention / floats), rel=1e-3)
    assert found.limits["int8"] == pytest.approx(512 / ((products + attention) / 800e9), rel=1e-3)
    slow = replace(MACHINE, peak_ops={"fp32": 300e9})
    assert roof(slow, model, Question("prefill", 512)).limits["exact"] == 0


def test_a_missing_peer_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path / "python", tmp_path / "python")
    with pytest.raises(BadInput, match=r"llama\.cpp is not at .*llama-bench: build it for this CPU: cmake"):
        peer_side("llama.cpp", "Q8_0", places, smollm2(), 2)
    with pytest.raises(BadInput, match=r"vllm is not at .*a venv with vLLM"):
        peer_side("vllm", "float32", places, smollm2(), 2)


def test_peers_have_a_side_a_format() -> None:
    llama = [("llama.cpp", form) for form in ("Q4_1", "Q4_0", "Q8_0", "bf16", "Q4_0-fa0")]
    assert peers("llama.cpp,vllm:float32") == [*llama, ("vllm", "float32")]
    for text, reason in (
        ("sglang", "known are"),
        ("llama.cpp:q8_0", "its formats are Q4_1, Q4_0, Q8_0, bf16, Q4_0-fa0"),
        ("llama.cpp,llama.cpp:Q4_0", "names a side twice"),
    ):
        with pytest.raises(BadInput, match=reason):
            peers(text)


RESULT = {
    "model": "M",
    "repeats": 1,
    "machine": {
        "hardware": "A machine, 2 cores",
        "cores": 2,
        "bandwidth": 30e9,
        "model_bandwidth": 40e9,
        "peak_ops": {"int8": 800e9},
        "foreign_cores": None,
    },
    "engines": ["exact"],
    "sides": {"exact": "biphase", "peer": "Peer 1"},
    "rows": [
        {
            "id": "decode-1",
            "question": {},
            "tokens_per_second": {"exact": [300.0], "peer": [100.0]},
            "roof": {
                "bytes": 96e6,
                "flops": 0.3e9,
                "attention_flops": 0.01e9,
                "limits": {"float": 250.0, "exact": 350.0, "int8": 416.7},
            },
        }
    ],
    "missing": ["vllm is not here"],
    "serving": {
        "http": {"exact": {"engine": [1000.0], "http": [950.0]}},
        "start": {"exact": [2.0, 2.5, 2.2]},
        "stall": {
            "exact": {
                "ITL budget 40 ms": {
                    "quiet_itl_ms": 5.04,
                    "p99_gap_ms": 40.1,
                    "worst_gap_ms": 55.2,
                    "worst_over_quiet": 11.0,
                    "ttft_ms": 4321.0,
                    "ttft_over_whole": 1.256,
                }
            }
        },
    },
}


def test_markdown_shows_every_part() -> None:
    text = markdown([RESULT])
    assert "| decode, 1 sequence | 300 | peer 100 | 3.00 | 0.096 | 0.3 | 250 | 350 | 417 |" in text
    assert "| decode, 1 sequence | 300 | 100 |" in text
    assert "| exact | 1,000 | 950 | 0.95 |" in text
    assert "| exact | 2.20 | 2.50 |" in text
    assert "| ITL budget 40 ms | 5.0 | 40 | 55 | 4,321 | 1.26 |" in text
    assert "40.0 GB/s over as many bytes as the weights; matrix products int8 800 GOP/s." in text
    assert "Left out: vllm is not here." in text


def test_runs_of_one_model_make_one_table_in_its_order() -> None:
    """The second run measured a row above the first's, against one peer that the first had not."""
    row = RESULT["rows"][0]
    peers = {"exact": [10.0], "other": [5.0]}
    second = RESULT | {"rows": [row | {"id": "prefill-512", "tokens_per_second": peers}], "serving": {}}
    second |= {"sides": {"exact": "biphase", "other": "Other 2"}, "repeats": 2}
    text = markdown([second, RESULT])
    assert "M (prefill 512), 2 repeats, each side in turn." in text
    assert "M (decode, 1 sequence), 1 repeat, each side in turn." in text
    assert "| decode, 1 sequence | 300 | peer 100 | 3.00 " in text
    assert "| tokens/s | exact | other | peer |" in text
    assert text.index("| decode, 1 sequence | 300 |  | 100 |") < text.index("| prefill 512 | 10 | 5 |  |")
    assert text.count("Left out: vllm is not here.") == 1


def test_a_run_without_one_of_the_engines_leaves_its_cells_empty() -> None:
    """And no engine of another run is taken for a peer."""
    row = RESULT["rows"][0]
    second = RESULT | {"engines": ["exact", "int8"], "sides": RESULT["sides"] | {"int8": "biphase"}, "serving": {}}
    second |= {
        "rows": [row | {"id": "prefill-512", "tokens_per_second": {"exact": [8.0], "int8": [9.0], "peer": [2.0]}}]
    }
    text = markdown([RESULT, second])
    assert "| prefill 512 | 8 | 9 | peer 2 | 4.00 | 4.50 |" in text
    assert "| decode, 1 sequence | 300 |  | peer 100 | 3.00 |  |" in text


def test_one_row_in_two_runs_is_refused() -> None:
    with pytest.raises(SystemExit, match="measured the same row of M: decode-1, decode-1"):
        markdown([RESULT, RESULT])


def test_a_format_without_its_file_is_said(tmp_path: Path) -> None:
    for name in ("llama-bench", "llama-batched-bench", "q8"):
        (tmp_path / name).touch()
    models = ModelSet("m", tmp_path, tmp_path, {"Q8_0": tmp_path / "q8", "Q4_0": tmp_path / "q4"})
    places = Places(tmp_path, tmp_path, tmp_path)
    assert peer_side("llama.cpp", "Q8_0", places, models, 2).name == "llama.cpp Q8_0"
    with pytest.raises(BadInput, match=r"llama.cpp Q4_0 needs .*q4: llama-quantize makes it"):
        peer_side("llama.cpp", "Q4_0", places, models, 2)
