"""``biphase stall`` recovers the chunk size that real servers were given: the built-in engine, llama.cpp, vLLM."""

import os

import pytest

from biphase.analysis.stall_result import ServerStall
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.experiments.stall import Run, StallPlan, measure
from biphase.models import DEFAULT_MODEL
from biphase.server.launch import managed_server
from tests.experiments.llama_cpp import llama_cpp_server
from tests.timing import holds_when_undisturbed


@pytest.fixture(autouse=True)
def few_steps_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that end too early are sent again, longer: 48 steps in hand are for measurements that users wait for."""
    monkeypatch.setattr("biphase.experiments.stall.AFTER_STEPS", 16)


def stall(url: str, plan: StallPlan) -> ServerStall:
    run = Run(lambda line: None, lambda done, total, what: None, "0")
    return clock.run(measure(url, None, Access(), plan, "server", run))


def check(url: str, plan: StallPlan, budget: int) -> None:
    """The budget of a step holds the decodes too: the prompt gets one token less for each stream."""

    def once() -> None:
        found = stall(url, plan)
        assert found.error is None
        assert found.victims == plan.victims
        assert found.chunking is not None
        assert found.chunking.chunk_tokens is not None
        assert found.chunking.chunk_tokens + plan.victims == pytest.approx(budget, rel=0.1)
        assert found.worst_over_quiet is not None
        assert found.worst_over_quiet > 1.5
        assert "prefix-cache" not in {verdict.name for verdict in found.verdicts}

    holds_when_undisturbed(once)


@pytest.mark.timeout(400)
def test_the_budget_of_the_built_in_engine() -> None:
    """On one thread: a second one would wait for the core on which the client reads."""
    with managed_server(DEFAULT_MODEL, "--max-num-batched-tokens", "128", "--threads", "1") as server:
        check(server.url, StallPlan(victims=2, prompt=700, repeats=1), 128)


@pytest.mark.timeout(400)
def test_the_batch_size_of_llama_cpp() -> None:
    with llama_cpp_server(slots=3, context=6144, batch=64) as url:
        check(url, StallPlan(victims=2, prompt=220, repeats=1), 64)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_budget_of_vllm() -> None:
    """BIPHASE_VLLM_URL is served with --max-num-batched-tokens $BIPHASE_VLLM_BUDGET, 512 unless that is set."""
    budget = int(os.environ.get("BIPHASE_VLLM_BUDGET", "512"))
    check(os.environ["BIPHASE_VLLM_URL"], StallPlan(victims=4, prompt=6 * budget, repeats=2), budget)
