"""What llama.cpp's programs print. data/llama_bench.json and llama_batched_bench.jsonl are the runs that its own
documentation shows (tools/llama-bench/README.md and tools/batched-bench/README.md, MIT licence)."""

import json
from pathlib import Path

import pytest

from answering import Question
from biphase.errors import RunFailed
from llama import about, arguments, batched_line, last_line, seconds

DATA = Path(__file__).parent / "data"
PREFILL, DECODE = (json.dumps([entry]) for entry in json.loads((DATA / "llama_bench.json").read_text()))
BATCHED = (DATA / "llama_batched_bench.jsonl").read_text().splitlines()


def test_seconds_of_a_prefill_and_of_a_decode() -> None:
    """avg_ns of the documentation's runs: pp512 in 72.13564 ms, tg128 in 1.07676788 s."""
    assert seconds(PREFILL, Question("prefill", 512)) == pytest.approx(0.07213564)
    assert seconds(DECODE, Question("decode", 128, 1, 0)) == pytest.approx(1.07676788)


def test_a_run_on_this_projects_model() -> None:
    """SmolLM2-135M Q4_1, one thread of a busy machine: 8 tokens after 16; 4 tokens of 2 sequences after 16."""
    output = (DATA / "llama_bench_cpu.json").read_text()
    assert seconds(output, Question("decode", 8, 1, 16)) == pytest.approx(8.955252741)
    assert about(output) == "llama.cpp 1 (0c1e570), llama 256M Q4_1, 1 threads"
    batched = (DATA / "llama_batched_bench_cpu.txt").read_text()
    assert seconds(batched, Question("decode", 4, 2, 16)) == pytest.approx(1.995510)


def test_seconds_of_several_sequences() -> None:
    """128 tokens of 2 sequences after 128 in 11.106112 s, between lines of the log."""
    output = f"\nmain: n_kv_max = 2048\n\n{BATCHED[1]}\n\nllama_perf_context_print: load time = 1 ms\n"
    assert seconds(output, Question("decode", 128, 2, 128)) == pytest.approx(11.106112)


def test_an_answer_to_another_question_is_refused() -> None:
    with pytest.raises(RunFailed, match=r"measured 512 \+ 0 tokens"):
        seconds(PREFILL, Question("prefill", 2048))
    with pytest.raises(RunFailed, match=r"measured 0 \+ 128 tokens"):
        seconds(DECODE, Question("decode", 128, 1, 6000))
    with pytest.raises(RunFailed, match="measured 128, 128, 2"):
        seconds(BATCHED[1], Question("decode", 128, 8, 128))


def test_output_that_is_no_result_is_named() -> None:
    with pytest.raises(RunFailed, match="no single test: 'error"):
        seconds("error: failed", Question("prefill", 512))
    with pytest.raises(RunFailed, match="2 results, expected one"):
        batched_line("\n".join(BATCHED))


def test_about_names_build_model_and_threads() -> None:
    assert about(PREFILL) == "llama.cpp 5163 (8cf427ff), qwen2 7B Q4_K - Medium, 8 threads"


def test_commands_ask_what_the_question_says() -> None:
    decode, prefill = arguments(Question("decode", 32, 1, 6000)), arguments(Question("prefill", 512))
    assert " ".join(decode) == "llama-bench -p 0 -n 32 -d 6000 -r 1 -o json"
    assert " ".join(prefill) == "llama-bench -p 512 -n 0 -d 0 -r 1 -o json"
    batched = arguments(Question("decode", 64, 8, 32))
    assert batched[0] == "llama-batched-bench"
    assert " ".join(batched).endswith("-npp 32 -ntg 64 -npl 8 --output-format jsonl")
    assert batched[batched.index("-c") + 1] == str(8 * 96)


def test_the_last_line_that_says_something() -> None:
    assert last_line("a\nerror: no model\n\n") == "error: no model"
    assert last_line("") == "it said nothing"
