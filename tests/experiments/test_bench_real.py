"""``biphase bench`` on real servers: the built-in engine, llama.cpp, and vLLM where one runs."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from biphase.analysis.bench_result import BenchResult
from biphase.analysis.slo import Slo
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.client.record import Record, RunFacts
from biphase.client.traffic import Load
from biphase.client.workload_file import Item
from biphase.client.workloads import Workload
from biphase.experiments.bench import BenchPlan, measure
from biphase.experiments.load_run import Timing
from biphase.models import DEFAULT_MODEL
from biphase.server.launch import managed_server
from tests.experiments.llama_cpp import llama_cpp_server

BLOCK = 32
SHARED = Workload(
    "shared",
    "pairs of prompts that share 96 of 120 tokens",
    tuple(Item(120, 6, None, (pair, pair + 100, pair + 200)) for pair in range(3) for _ in range(2)),
    BLOCK,
)


def bench(url: str, **plan: Any) -> tuple[BenchResult, list[Record]]:
    records: list[Record] = []

    def keep(line: Record | RunFacts) -> None:
        if isinstance(line, Record):
            records.append(line)

    plan = {"loads": (Load("closed", 1.0),), "timing": Timing(300.0, 60.0, most=6), "warmup_s": 0.0, **plan}
    asked = BenchPlan(SHARED, slo=Slo(ttft_ms=600_000, itl_ms=60_000), **plan)
    return clock.run(measure(url, None, Access(), asked, keep, lambda *_: None, "test")), records


def check(result: BenchResult, records: list[Record]) -> list[int | None]:
    """Counts are the server's and exact; cached tokens of the prompts in their order come back."""
    assert result.profile.error is None
    assert [(r.error, r.prompt_tokens, r.completion_tokens) for r in records] == [(None, 120, 6)] * 6
    assert {r.prompt_tokens_source for r in records} == {"usage"}
    found = result.bench.levels[0].measured
    assert found.outcomes.completed >= 5  # the last is sent when the window ends
    assert found.attainment is not None
    assert found.attainment.all == 1.0
    assert not {v.name for v in result.profile.verdicts} & {"early-eos", "not-all-answered", "foreign-traffic"}
    return [r.cached_tokens for r in sorted(records, key=lambda r: r.sent)]


@pytest.mark.timeout(400)
def test_the_built_in_engine_counts_its_engine_seconds_and_finds_the_shared_blocks() -> None:
    with managed_server(DEFAULT_MODEL) as server:
        result, records = bench(server.url, per_hour=1.0)
    cached = check(result, records)
    assert all((n or 0) == 0 for n in cached[::2])
    assert all(64 <= (n or 0) <= 96 for n in cached[1::2])  # whole blocks of the engine's own size
    price = result.bench.levels[0].price
    assert price is not None
    assert price.phase_time.source == "measured"
    assert 0 < price.busy <= 1.05
    assert price.input_tokens == 720
    assert price.output_tokens == 36


@pytest.fixture
def llama_cpp() -> Iterator[str]:
    with llama_cpp_server(batch=64) as url:
        yield url


@pytest.mark.timeout(400)
def test_llama_cpp_finds_the_shared_tokens(llama_cpp: str) -> None:
    result, records = bench(llama_cpp)
    cached = check(result, records)
    assert all((n or 0) <= 2 for n in cached[::2])  # the same first token by chance, and BOS
    # the longest common prefix of a slot; two slots take turns, so a pair may meet in different ones
    assert all((n or 0) <= 98 for n in cached[1::2])
    assert max(n or 0 for n in cached) >= 90
    edges = {bucket.up_to for bucket in result.bench.levels[0].by_uncached}
    assert 128 in edges
    assert 32 in edges


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm() -> None:
    result, records = bench(os.environ["BIPHASE_VLLM_URL"])
    cached = check(result, records)
    assert all((n or 0) == 0 for n in cached[::2])
