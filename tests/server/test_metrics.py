"""The exposition against what vLLM's dashboards expect, and its numbers against steps counted by hand."""

from collections.abc import Callable

import aiohttp
import pytest
from calling import get, post, stream, with_client
from prometheus_client.parser import text_string_to_metric_families
from running_server import Server, wait_for

from biphase.engine.messages import Ready, Step
from biphase.server.metrics import Metrics, one_two_five, prompt_length_label
from biphase.server.timeline import Timeline

# Names and types of vLLM's v1 engine (vllm/v1/metrics/loggers.py), counters without their _total.
VLLM = {
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"},
    "counter": {
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"),
        *("request_success", "prompt_tokens_cached", "prompt_tokens_by_source"),
    },
    "histogram": {
        *("iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens", "request_params_n"),
        *("request_max_num_generation_tokens", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
    },
}
BUCKETS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
    "640 2560",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "request_prefill_time_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_prompt_tokens": "1 2 5 10 20 50",
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def described() -> Metrics:
    metrics = Metrics("tiny")
    metrics.describe(Ready(64, 300, "float32", "float32", 16, 4, 0.0))
    return metrics


def samples(text: str) -> Samples:
    """Values by name and by the labels other than model and engine."""
    return {
        (
            sample.name,
            tuple(sorted(item for item in sample.labels.items() if item[0] not in ("model_name", "engine"))),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_names_types_and_labels_are_vllm_s() -> None:
    families = list(text_string_to_metric_families(described().text().decode()))
    for kind, names in VLLM.items():
        assert {f"vllm:{name}" for name in names} <= {family.name for family in families if family.type == kind}
    for family in families:
        assert all({"engine"} <= set(sample.labels) for sample in family.samples)
        if family.name != "vllm:cache_config_info":
            assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_are_vllm_s(name: str) -> None:
    found = samples(described().text().decode())
    limits = sorted(float(dict(labels)["le"]) for sample, labels in found if sample == f"vllm:{name}_bucket")
    assert limits[:-1] == [float(limit) for limit in BUCKETS[name].split()]


def test_buckets_of_counts_end_below_the_context() -> None:
    assert one_two_five(1) == [1]
    assert one_two_five(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


@pytest.mark.parametrize(
    ("tokens", "label"),
    [(1, "0-1k"), (1023, "0-1k"), (1024, "1k-4k"), (16383, "4k-16k"), (65535, "16k-64k"), (65536, "64k+")],
)
def test_prompt_lengths_fall_in_the_gateways_buckets(tokens: int, label: str) -> None:
    assert prompt_length_label(tokens) == label


def test_totals_of_the_engine_become_counters_that_never_fall() -> None:
    metrics = described()
    metrics.step(Step((), 0.5, 100, 2, 3, 1, 0.25, 0.4, 0.1, 1, 100, 32))
    metrics.step(Step((), 0.25, 0, 3, 3, 1, 0.5, 0.4, 0.35, 2, 100, 32))
    metrics.step(Step((), 0.0, 0, 0, 3, 2, 0.5))  # a refusal: it ran nothing and brings no totals
    found = samples(metrics.text().decode())
    assert value(found, "biphase:engine_seconds_total", phase="prefill") == pytest.approx(0.4)
    assert value(found, "biphase:engine_seconds_total", phase="decode") == pytest.approx(0.35)
    assert value(found, "vllm:num_preemptions_total") == 2
    assert value(found, "vllm:prefix_cache_queries_total") == 100
    assert value(found, "vllm:prefix_cache_hits_total") == 32
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_compute") == 100
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert value(found, "biphase:step_seconds_count") == 2
    assert value(found, "biphase:step_seconds_sum") == pytest.approx(0.75)
    assert value(found, "vllm:iteration_tokens_total_sum") == 105
    assert value(found, "biphase:step_tokens_count", phase="prefill") == 1
    assert value(found, "biphase:step_tokens_sum", phase="decode") == 5
    assert value(found, "vllm:num_requests_waiting") == 2


def test_a_request_s_time_is_parted_into_queue_prefill_and_decode() -> None:
    metrics = described()
    # submitted at 10 s; 0.5 s in the queue; first token at 12 s, third and last at 13 s
    metrics.ended(Timeline(20, 5, 10.0, 12.0, 13.0, 3, 8, 0.5, "length"))
    found = samples(metrics.text().decode())
    expected = {
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 1.0,
        "request_inference_time_seconds": 2.5,
        "e2e_request_latency_seconds": 3.0,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 20,
        "request_generation_tokens": 3,
        "request_params_max_tokens": 5,
        "request_prefill_kv_computed_tokens": 12,
    }
    assert {name: value(found, f"vllm:{name}_sum") for name in expected} == pytest.approx(expected)
    assert value(found, "vllm:request_success_total", finished_reason="length") == 1
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 0


def test_a_running_server_counts_tokens_reasons_and_latencies(launch: Callable[..., Server]) -> None:
    server = launch(cached=1).wait_until_ready()
    url = server.url + "/v1/completions"
    post(url, {"prompt": ["abcd", "abce"], "n": 2, "max_tokens": 2, "ignore_eos": True})
    post(url, {"prompt": "abcd", "stop": "b"})
    stream(url, prompt="ab")
    found = samples(get(server.url + "/metrics")[1])
    assert value(found, "vllm:request_success_total", finished_reason="length") == 4
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(found, "vllm:prompt_tokens_total") == 4 * 4 + 4 + 2
    assert value(found, "vllm:prompt_tokens_cached_total") == 6
    assert value(found, "vllm:time_to_first_token_seconds_count") == 6
    assert value(found, "biphase:time_to_first_token_seconds_count", input_sequence_length="0-1k") == 6
    assert value(found, "vllm:inter_token_latency_seconds_count") >= 4 + 1 + 2  # one a token, the first of each aside
    assert value(found, "vllm:request_params_n_sum") == 2 + 1 + 1
    assert value(found, "vllm:request_max_num_generation_tokens_count") == 4
    assert value(found, "vllm:request_queue_time_seconds_sum") == pytest.approx(6 * 0.125)
    assert value(found, "vllm:num_requests_running") == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_in_the_metrics_are_those_of_the_usage(launch: Callable[..., Server], streamed: bool) -> None:
    """The engine runs ahead while the server finds stop strings: what it made after them is in neither count."""
    server = launch().wait_until_ready()
    url, options = server.url + "/v1/completions", {"stream_options": {"include_usage": True}} if streamed else {}
    used = 0
    for n in range(20):
        body = {"prompt": ["abcdefg" * 3, "gfedcba"], "n": 2, "stop": "abcdefg"[n % 7], "max_tokens": 30, **options}
        answer = stream(url, **body)[-1] if streamed else post(url, body)[1]
        used += answer["usage"]["completion_tokens"]
    found = samples(get(server.url + "/metrics")[1])
    assert value(found, "vllm:generation_tokens_total") == used
    assert value(found, "vllm:request_generation_tokens_sum") == used
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 80


def test_a_refused_request_is_counted_as_such_alone(launch: Callable[..., Server]) -> None:
    server = launch(refuse="queue_full").wait_until_ready()
    post(server.url + "/v1/completions", {"prompt": "a"})
    post(server.url + "/v1/completions", {"prompt": "a", "n": 4})
    found = samples(get(server.url + "/metrics")[1])
    assert value(found, "biphase:requests_refused_total", reason="queue_full") == 5  # each choice is a request
    assert value(found, "vllm:request_prompt_tokens_count") == 0
    assert value(found, "vllm:request_success_total", finished_reason="abort") == 0


def test_a_failure_in_the_engine_is_counted_as_error(launch: Callable[..., Server]) -> None:
    server = launch(fail_at=2).wait_until_ready()
    post(server.url + "/v1/completions", {"prompt": "abc"})
    wait_for(
        lambda: (
            value(samples(get(server.url + "/metrics")[1]), "vllm:request_success_total", finished_reason="error") == 1
        )
    )


def test_a_client_that_leaves_is_counted_as_abort(launch: Callable[..., Server]) -> None:
    server = launch(gap=0.02).wait_until_ready()

    async def leave(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
        response = await session.post(server.url + "/v1/completions", json=body)
        await response.content.readline()
        response.close()

    with_client(leave)
    wait_for(
        lambda: (
            value(samples(get(server.url + "/metrics")[1]), "vllm:request_success_total", finished_reason="abort") == 1
        )
    )
