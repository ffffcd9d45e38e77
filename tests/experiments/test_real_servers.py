"""``biphase profile`` on servers of other projects: llama.cpp from the wheel xllamacpp, vLLM where one runs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from biphase.client.record import read_records
from tests.experiments.llama_cpp import llama_cpp_server
from tests.in_process import biphase


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[str]:
    with llama_cpp_server(batch=64) as url:
        yield url


@pytest.fixture(autouse=True)
def one_round_of_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rounds and streams are for the law of decode, of which nothing is asked here; the server has two slots."""
    monkeypatch.setattr("biphase.experiments.profile.ROUNDS", 1)
    monkeypatch.setattr("biphase.cli.profile_options.BATCHES", (2,))


def profile(url: str, tmp_path: Path, lengths: str = "1,16,64") -> dict[str, Any]:
    words = ["--lengths", lengths, "--tokens", "4", "--repeats", "2"]
    ended = biphase("profile", url, *words, "--json", str(tmp_path / "p.json"), "--records", str(tmp_path / "r.jsonl"))
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    return result


def check(result: dict[str, Any], records_path: Path) -> None:
    assert [row["prompt_tokens"] for row in result["rows"]] == [1, 16, 64]
    assert [row["counted_tokens"] for row in result["rows"]] == [1, 16, 64]
    assert [row["requests"] for row in result["rows"]] == [2, 2, 2]
    assert result["left_out"] == []
    named = {verdict["name"] for verdict in result["verdicts"]}
    assert not named & {"prefix-cache", "early-eos", "prompt-length", "foreign-traffic"}
    for record in read_records(records_path):
        assert record.prompt_tokens == record.asked_prompt_tokens
        assert record.prompt_tokens_source == "usage"
        assert (record.cached_tokens or 0) <= 1
        assert record.completion_tokens == record.asked_completion_tokens
        assert sum(chunk.tokens for chunk in record.chunks) == record.completion_tokens
        assert record.concurrency > 1 or record.asked_completion_tokens == 4
        assert record.sent <= record.chunks[0].t <= record.chunks[-1].t <= record.ended


@pytest.mark.timeout(180)
def test_profile_of_llama_cpp(llama_cpp: str, tmp_path: Path) -> None:
    result = profile(llama_cpp, tmp_path)
    check(result, tmp_path / "r.jsonl")
    assert "the server's /tokenize" in result["notes"][0]
    assert result["server_side"]["agree"] is True


@pytest.mark.timeout(240)
def test_the_chunk_size_of_llama_cpp(llama_cpp: str, tmp_path: Path) -> None:
    """Its batch holds 64 tokens; one of them belongs to the stream that watches."""
    found = profile(llama_cpp, tmp_path, lengths="1,16,300")["chunked_prefill"]
    assert found["chunk_tokens_least"] <= 64
    assert found["chunk_tokens_most"] >= 62
    assert found["chunk_tokens"] == pytest.approx(63, rel=0.15)


@pytest.mark.vllm
def test_profile_of_vllm(tmp_path: Path) -> None:
    result = profile(os.environ["BIPHASE_VLLM_URL"], tmp_path)
    check(result, tmp_path / "r.jsonl")
    sources = {record.completion_tokens_source for record in read_records(tmp_path / "r.jsonl")}
    assert sources == {"continuous_usage"}
