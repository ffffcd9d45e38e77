"""Where metrics are looked for, and what is said where there are none."""

import asyncio
from collections.abc import Mapping

import pytest

from biphase.client.endpoint import Access, connect
from biphase.client.metrics_page import Page, find_page, metrics_urls
from biphase.errors import BadInput, RunFailed
from tests.metrics_server import Answer, Answers, metrics_server, pages


def found(answers: Answers, suffix: str = "", access: Access | None = None) -> Page:
    async def find(url: str) -> Page:
        async with connect(access or Access(timeout_s=5)) as session:
            return await find_page(session, url)

    with metrics_server(answers) as url:
        return asyncio.run(find(url + suffix))


@pytest.mark.parametrize(
    ("url", "first"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://h:1/v1", "http://h:1/metrics"),
        ("http://h:1/v1/chat/completions", "http://h:1/metrics"),
        ("https://h/llm/v1/", "https://h/llm/metrics"),
        ("http://h:1/metrics", "http://h:1/metrics"),
        ("http://h:1/prometheus/metrics/", "http://h:1/prometheus/metrics"),
    ],
)
def test_addresses(url: str, first: str) -> None:
    assert metrics_urls(url)[0] == first


def test_a_base_path_is_tried_before_the_root_and_a_page_alone() -> None:
    assert metrics_urls("http://h/llm/v1") == (
        "http://h/llm/metrics",
        "http://h/llm/prometheus/metrics",
        "http://h/metrics",
        "http://h/prometheus/metrics",
    )
    assert metrics_urls("http://h/x/metrics") == ("http://h/x/metrics",)
    with pytest.raises(BadInput):
        metrics_urls("nothing")


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics", "/llm/metrics"])
def test_the_page_is_found_beside_the_api(path: str) -> None:
    page = found(pages("a_total 1\n", path=path), "/llm/v1")
    assert page.url.endswith(path)
    assert page.scrape.value(["a"]) == 1


def test_a_page_of_json_is_passed_over() -> None:
    """TensorRT-LLM's /metrics is JSON; its Prometheus page lies elsewhere."""

    def answers(path: str, headers: Mapping[str, str]) -> Answer:
        return (
            Answer("[]") if path == "/metrics" else pages("trtllm_request_success_total 1\n", path=path)(path, headers)
        )

    assert found(answers).url.endswith("/prometheus/metrics")


def test_an_empty_page_is_one() -> None:
    assert found(pages("")).scrape.series == {}


def test_llama_cpp_s_process_is_in_a_header() -> None:
    page = found(pages(Answer("llamacpp:prompt_tokens_total 1\n", headers={"Process-Start-Time-Unix": "112"})))
    assert page.scrape.process == "112"


def only_version(path: str, headers: Mapping[str, str]) -> Answer:
    return Answer('{"version": "0.12.0"}') if path == "/api/version" else Answer("404 page not found", 404)


def locked(path: str, headers: Mapping[str, str]) -> Answer:
    return Answer("a_total 1\n") if headers.get("Authorization") == "Bearer k" else Answer("Unauthorized", 401)


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (
            pages("x", path="/nowhere"),
            r"HTTP 404; no metrics at /metrics, /prometheus/metrics; switch them on \(SGLang",
        ),
        (pages("<html><body>hello</body></html>"), "not metrics in Prometheus' text format"),
        (
            pages(Answer('{"error": {"code": 501, "message": "start it with --metrics"}}', 501)),
            "HTTP 501: start it with --metrics; switch them on",
        ),
        (pages(Answer('{"error": {"message": "Loading model"}}', 503)), "HTTP 503: Loading model$"),
        (only_version, "Ollama has no metrics; each of its native replies has prompt_eval_duration"),
        (locked, "HTTP 401: Unauthorized; set BIPHASE_API_KEY or pass --api-key"),
        (pages(Answer("", 0)), "closed the connection"),
    ],
)
def test_why_there_is_none(answers: Answers, line: str) -> None:
    with pytest.raises(RunFailed, match=line):
        found(answers)


def test_the_key_opens_the_page() -> None:
    assert found(locked, access=Access({"Authorization": "Bearer k"}, 5)).scrape.value(["a"]) == 1
