"""The split of real engines beside the client's own records of the same requests."""

import os
from collections.abc import Iterator, Sequence

import pytest

from biphase.client.record import Record
from biphase.experiments.split import SplitResult
from biphase.models import DEFAULT_MODEL
from biphase.server.launch import managed_server
from tests.experiments.llama_cpp import llama_cpp_server
from tests.experiments.split_traffic import client_seconds, watched_traffic
from tests.timing import holds_when_undisturbed

SHAPES = ((192, 12), (64, 24), (128, 16), (256, 8))
CLOSE = 0.02
"""Of all request-seconds: HTTP and the client's clock are no part of the server's, and little beside them."""


@pytest.fixture(scope="module")
def built_in() -> Iterator[str]:
    with managed_server(DEFAULT_MODEL) as server:
        yield server.url


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[str]:
    with llama_cpp_server() as url:
        yield url


def check_tokens(result: SplitResult, records: Sequence[Record]) -> None:
    """Exactly, as the window holds these requests and no others."""
    found = result.split
    assert [record.error for record in records] == [None] * len(SHAPES)
    computed = sum((record.prompt_tokens or 0) - (record.cached_tokens or 0) for record in records)
    assert found.tokens.prefill is not None
    assert found.tokens.decode is not None
    assert found.generated_tokens is not None
    assert found.tokens.prefill.value == computed
    assert found.generated_tokens.value == sum(record.completion_tokens or 0 for record in records)
    if found.finished is not None:
        assert found.finished.value == len(records)
        assert found.tokens.decode.value == found.generated_tokens.value - len(records)
    assert found.running is not None
    assert (found.running.first, found.running.last) == (0, 0)
    assert found.running.most <= 2


def check_seconds(result: SplitResult, records: Sequence[Record]) -> None:
    """A server's request-seconds lie within its client's, and miss little of them."""
    found = result.split
    assert found.queue_s is not None
    assert found.request_s.prefill is not None
    assert found.request_s.decode is not None
    first, decode = client_seconds(records)
    whole = first + decode
    assert found.queue_s.value + found.request_s.prefill.value == pytest.approx(first, abs=CLOSE * whole)
    assert found.request_s.decode.value == pytest.approx(decode, abs=CLOSE * whole)


@pytest.mark.timeout(300)
def test_split_of_the_built_in_engine(built_in: str) -> None:
    def check() -> None:
        result, records = watched_traffic(built_in, SHAPES, 2)
        check_tokens(result, records)
        found = result.split
        assert found.engine == "biphase"
        assert found.engine_s.origin == "counted"
        assert found.engine_s.prefill is not None
        assert found.engine_s.decode is not None
        assert found.window_s is not None
        assert 0 < found.engine_s.prefill.value + found.engine_s.decode.value <= found.window_s
        assert found.decode_batch is not None
        assert 1 <= found.decode_batch.value <= 2
        assert found.price is not None
        check_seconds(result, records)

    holds_when_undisturbed(check)


@pytest.mark.timeout(300)
def test_split_of_llama_cpp(llama_cpp: str) -> None:
    result, records = watched_traffic(llama_cpp, SHAPES, 2)
    check_tokens(result, records)
    assert result.split.engine == "llama.cpp"
    assert result.split.engine_s.prefill is not None
    assert result.split.engine_s.origin == "modelled"
    decode = result.split.request_s.decode
    assert decode is not None
    assert decode.value == pytest.approx(client_seconds(records)[1], rel=0.1)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_split_of_vllm() -> None:
    def check() -> None:
        result, records = watched_traffic(os.environ["BIPHASE_VLLM_URL"], SHAPES, 2)
        check_tokens(result, records)
        assert result.split.engine == "vLLM"
        assert result.split.engine_s.origin == "none"
        check_seconds(result, records)

    holds_when_undisturbed(check)
