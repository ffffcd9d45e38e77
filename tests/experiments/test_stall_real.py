"""``biphase stall`` recovers the chunk size that real servers were given: the built-in engine, llama.cpp, vLLM."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from biphase.analysis.stall_result import ServerStall
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.experiments.stall import Run, StallPlan, measure
from biphase.models import DEFAULT_MODEL, locate
from biphase.server.launch import managed_server
from tests.experiments.test_real_servers import free_port, wait_until_healthy
from tests.timing import holds_when_undisturbed

LLAMA_CPP = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel, params.n_ctx = sys.argv[1], int(sys.argv[2]), 3, 6144
params.n_batch = params.n_ubatch = int(sys.argv[3])
params.hostnames, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = ["127.0.0.1"], 1, 1
server = xllamacpp.Server(params)
sys.stdin.read()
"""


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
    with managed_server(DEFAULT_MODEL, "--max-num-batched-tokens", "128") as server:
        check(server.url, StallPlan(victims=2, prompt=700, repeats=1), 128)


@contextmanager
def llama_cpp(n_batch: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-c", LLAMA_CPP, str(locate(DEFAULT_MODEL)), str(port), str(n_batch)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        try:
            wait_until_healthy(url, process)
            yield url
        finally:
            process.kill()


@pytest.mark.timeout(400)
def test_the_batch_size_of_llama_cpp() -> None:
    pytest.importorskip("xllamacpp", reason="the wheel xllamacpp is for x86-64 Linux")
    with llama_cpp(64) as url:
        check(url, StallPlan(victims=2, prompt=220, repeats=1), 64)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_budget_of_vllm() -> None:
    """BIPHASE_VLLM_URL is served with --max-num-batched-tokens $BIPHASE_VLLM_BUDGET, 512 unless that is set."""
    budget = int(os.environ.get("BIPHASE_VLLM_BUDGET", "512"))
    check(os.environ["BIPHASE_VLLM_URL"], StallPlan(victims=4, prompt=6 * budget, repeats=2), budget)
