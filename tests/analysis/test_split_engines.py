"""Pages of every engine at two versions, in every spelling, against numbers worked out by hand."""

import re
from dataclasses import replace

import pytest

from biphase.analysis.phase_split import Gauge, Split, Unit, recognised, split, windows
from biphase.analysis.split_engines import explain_unknown, recognise
from biphase.analysis.split_window import Reading
from biphase.client.scrape import Scrape, parse_metrics
from tests.analysis.engine_pages import PAGES, SECONDS, Page
from tests.analysis.exposition import counter, texts


def scrapes(page: Page) -> list[Scrape]:
    """Both pages, ten seconds apart."""
    return [
        replace(parse_metrics(text), at=1e9 + SECONDS * n) for n, text in enumerate(texts(page.style, page.metrics))
    ]


def split_of(found: list[Scrape]) -> Split:
    engine = recognised(found)
    assert engine is not None
    stretches = windows(engine, found)
    assert len(stretches) == 1
    return split(engine, stretches[0])


def value(found: Split, path: str) -> float | None:
    """A number of a split by the name in a page's expectations; of a gauge its last value."""
    at: object = found
    for name in path.split("."):
        at = getattr(at, name)
    if at is None or isinstance(at, Unit):
        return None
    if isinstance(at, Gauge):
        return at.last
    assert isinstance(at, Reading)
    return at.value


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_every_quantity_of_every_engine(page: Page) -> None:
    found = split_of(scrapes(page))
    assert found.engine == page.engine
    assert found.window_s == SECONDS
    assert found.engines == page.engines
    assert found.models == page.models
    expected = {path: None if number is None else pytest.approx(number) for path, number in page.expected.items()}
    assert {path: value(found, path) for path in expected} == expected


RESPELLED = {
    "relabelled": lambda text: re.sub(r"\b(vllm|sglang|llamacpp|lmdeploy|biphase|mlx_serve):", r"\1_", text),
    "without _total": lambda text: re.sub(r"(?<!iteration_tokens)_total(?=[ {])", "", text),
    "untyped": lambda text: re.sub(r"(?m)^# .*\n", "", text),
}


@pytest.mark.parametrize("respell", RESPELLED.values(), ids=list(RESPELLED))
@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_spelling_changes_nothing_but_the_text(page: Page, respell: object) -> None:
    assert callable(respell)
    pages = [respell(text) for text in texts(page.style, page.metrics)]
    found = split_of([replace(parse_metrics(text), at=SECONDS * n) for n, text in enumerate(pages)])
    assert found.engine == page.engine
    assert {path: value(found, path) for path in page.expected} == {
        path: None if number is None else pytest.approx(number) for path, number in page.expected.items()
    }


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_a_missing_name_is_none_and_never_zero(page: Page) -> None:
    """Whichever family is taken away, no quantity becomes 0 that was not: it takes another source, or is None."""
    before = split_of(scrapes(page))
    for name in {metric.name for metric in page.metrics}:
        rest = [metric for metric in page.metrics if metric.name != name]
        found = scrapes(replace(page, metrics=rest))
        if recognised(found) is None:
            continue
        after = split_of(found)
        for path in page.expected:
            if value(before, path) and path not in ("tokens.prefill", "cached_tokens"):
                assert value(after, path) != 0, (name, path)


def test_engine_seconds_of_a_mixed_step_are_shared_by_tokens() -> None:
    page = PAGES["sglang new"]
    mixed = counter("sglang:gpu_execution_seconds", 0, 3, model_name="m", category="forward_mixed")
    found = split_of(scrapes(replace(page, metrics=[*page.metrics, mixed])))
    # 800 of 1200 tokens are prefill: 2 of the 3 s
    assert value(found, "engine_s.prefill") == pytest.approx(4.0)
    assert value(found, "engine_s.decode") == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("litellm_requests_total 3\n", "LiteLLM is a proxy"),
        ('nv_trt_llm_request_metrics{request_type="active"} 3\n', "Triton counts neither"),
        ("http_requests_total 3\nprocess_start_time_seconds 1\n", "the first of its 1 names: http_requests"),
        ("process_start_time_seconds 1\n", "it has none"),
    ],
)
def test_a_page_of_something_else_is_told_from_an_engine_s(text: str, line: str) -> None:
    found = parse_metrics(text)
    assert recognise(found) is None
    assert line in explain_unknown(found)
