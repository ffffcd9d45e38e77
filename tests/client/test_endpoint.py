"""Addresses of servers as people write them."""

import pytest

from biphase.client.endpoint import bases, parse_url, root_of
from biphase.errors import BadInput


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/chat/completions", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/completions", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1"),
        ("https://api.example.org/openai/v1", "https://api.example.org/openai/v1"),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("gpu-7.lab:30000", "http://gpu-7.lab:30000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_urls_as_people_write_them(written: str, url: str) -> None:
    assert parse_url(written) == url


@pytest.mark.parametrize(
    "written",
    ["", "smollm2-135m", "ftp://host:1", "http://", "http://host:99999", "http://host:x", "http://a b", "/v1"],
)
def test_what_is_no_url_says_what_was_expected(written: str) -> None:
    with pytest.raises(BadInput, match=r"expected something like http://127\.0\.0\.1:8000"):
        parse_url(written)


@pytest.mark.parametrize(
    ("url", "candidates", "root"),
    [
        ("http://h:1", ("http://h:1/v1", "http://h:1"), "http://h:1"),
        ("http://h:1/v1", ("http://h:1/v1",), "http://h:1"),
        ("https://h/openai", ("https://h/openai/v1", "https://h/openai"), "https://h/openai"),
        ("https://h/api/paas/v4", ("https://h/api/paas/v4",), "https://h/api/paas"),
        (
            "https://h/v1beta/openai",
            ("https://h/v1beta/openai/v1", "https://h/v1beta/openai"),
            "https://h/v1beta/openai",
        ),
    ],
)
def test_where_the_api_may_be(url: str, candidates: tuple[str, ...], root: str) -> None:
    assert bases(url) == candidates
    assert root_of(candidates[0]) == root
