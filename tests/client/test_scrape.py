"""Counters of servers: every spelling is found, what is missing is None, and ranks are not counted twice."""

import pytest

from biphase.client.scrape import GENERATED, RUNNING, parse_metrics

VLLM = """
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 824.0
vllm:generation_tokens_total{engine="1",model_name="m"} 100.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
OTHERS = {
    "without _total": "# TYPE vllm:generation_tokens counter\nvllm:generation_tokens 7\n",
    "colon turned": "# TYPE vllm_generation_tokens_total counter\nvllm_generation_tokens_total 7\n",
    "untyped": "vllm_generation_tokens 7\n",
    "llama.cpp": "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 7\n",
    "ranks": 'sglang:generation_tokens_total{tp_rank="0"} 7\nsglang:generation_tokens_total{tp_rank="1"} 7\n',
}


def test_engines_are_summed_and_creation_times_are_not() -> None:
    found = parse_metrics(VLLM)
    assert found.value(GENERATED) == 924
    assert found.value(RUNNING) == 3


@pytest.mark.parametrize("text", OTHERS.values(), ids=list(OTHERS))
def test_every_spelling(text: str) -> None:
    found = parse_metrics(text)
    assert found.value(GENERATED) == 7
    assert found.value(RUNNING) is None


def test_what_is_no_exposition_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_metrics("<html>not found</html>\n")
