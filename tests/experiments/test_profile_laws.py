"""A whole profile over HTTP of a server that obeys known laws: constants, batches, chunks and counters come back."""

import pytest

from biphase.analysis.profile_result import ProfileResult
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.experiments.profile import ProfilePlan, measure
from tests.law_server import law_server
from tests.timing import holds_when_undisturbed


def profile(url: str, plan: ProfilePlan) -> ProfileResult:
    return clock.run(measure(url, None, Access(timeout_s=20), plan, lambda line: None, lambda *step: None, "0"))


def test_the_laws_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are slept: waking two processes costs up to 1 ms of 8 to 30; the slopes are free of that.

    Two rounds of batches: a machine's own noise asks for more, a server that sleeps has next to none.
    """
    monkeypatch.setattr("biphase.experiments.profile.ROUNDS", 2)
    plan = ProfilePlan((1, 64, 256, 1024), 12, 4, (2, 4, 8))

    def check() -> None:
        with law_server(a=20, b=0.05, k=1e-3) as url:
            result = profile(url, plan)
        prefill, decode = result.prefill_law, result.decode_law
        assert prefill is not None
        assert decode is not None
        assert prefill.a_ms.value == pytest.approx(20, abs=1.5)
        assert prefill.b_ms_per_token.value == pytest.approx(0.05, rel=0.1)
        assert decode.w_ms_per_sequence is not None
        assert decode.w_ms_per_sequence.value == pytest.approx(0.5, abs=0.15)
        assert decode.k_ms_per_token is not None
        assert decode.k_ms_per_token.value == pytest.approx(1e-3, rel=0.3)
        assert decode.t0_ms.value == pytest.approx(8, abs=1)
        assert {1, 2, 4, 8} <= set(decode.batches)
        assert "foreign-traffic" not in {v.name for v in result.verdicts}

    holds_when_undisturbed(check)


@pytest.mark.parametrize("chunk", [100, 256, 300])
def test_the_chunk_size_is_read_off_a_stream_beside_prompts(chunk: int) -> None:
    """Each chunk raises one gap; further prompts narrow the size down to 10 %, so its estimate is within 5 %."""
    plan = ProfilePlan((16, 1024), 12, 2, (), probe=True)

    def check() -> None:
        with law_server(chunk=chunk, a=20, t0=4) as url:
            found = profile(url, plan).chunked_prefill
        assert found is not None
        assert found.single_size
        assert found.chunk_tokens_least <= chunk <= (found.chunk_tokens_most or 0)
        assert found.chunk_tokens == pytest.approx(chunk, rel=0.07)

    holds_when_undisturbed(check)


def test_a_prompt_that_ran_whole_has_no_chunk_size() -> None:
    plan = ProfilePlan((16, 1024), 12, 2, (), probe=True)

    def check() -> None:
        with law_server(t0=4) as url:
            found = profile(url, plan).chunked_prefill
        assert found is not None
        assert (found.chunk_tokens, found.chunk_tokens_least, found.chunk_tokens_most) == (None, 1024, None)
        assert found.raised_gaps == 1

    holds_when_undisturbed(check)
