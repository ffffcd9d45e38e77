"""A login in a URL goes to the server and to nobody else: not to a message, a table, a file or a record."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from biphase.client.endpoint import Access, parse_url
from biphase.errors import BadInput
from biphase.redaction import redacted, redacted_command
from tests.analysis.engine_pages import PAGES
from tests.analysis.exposition import texts
from tests.in_process import biphase
from tests.metrics_server import Answer, metrics_server, pages
from tests.scripted_server import scripted

SECRET = "s3cr%40t"
"""As in a URL: an @ in a password is percent-encoded."""
BASIC = "Basic " + base64.b64encode(b"anna:s3cr@t").decode()
BEFORE, AFTER = texts("python", PAGES["vllm new"].metrics)


def with_login(url: str) -> str:
    return url.replace("://", f"://anna:{SECRET}@")


def no_secret(text: str) -> bool:
    return not any(secret in text for secret in (SECRET, "s3cr@t", "s3cr", BASIC, BASIC.removeprefix("Basic ")))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://anna:pw@h:1/v1: HTTP 401", "http://...@h:1/v1: HTTP 401"),
        ("no 'https://anna:p@w@h'; no", "no 'https://...@h'; no"),
        ("http://token@h", "http://...@h"),
        ("--compare=http://a:b@h", "--compare=http://...@h"),
        ("anna:pw@h:8000", "...@h:8000"),
        ("http://h/metrics?token=abc, and", "http://h/metrics?... and"),
        ("http://h:1/v1/models@2: no", "http://h:1/v1/models@2: no"),
        ("mail to a@b: no: yes", "mail to a@b: no: yes"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_command_line_without_keys_headers_and_logins() -> None:
    words = ["bench", "http://a:b@h", "--api-key", "k", "--header=X: y", "--header", "Z: a@b", "--rate", "1"]
    assert redacted_command(words) == [
        *("bench", "http://...@h", "--api-key", "...", "--header=...", "--header", "...", "--rate", "1")
    ]


def test_a_login_becomes_a_header_and_leaves_the_url() -> None:
    url, access = Access({"X": "y"}).at(parse_url(with_login("http://h:1/v1/")))
    assert (url, access.headers) == ("http://h:1/v1", {"X": "y", "Authorization": BASIC})
    plain = Access()
    assert plain.at("http://h:1/a@b") == ("http://h:1/a@b", plain)
    with pytest.raises(BadInput, match=r"^http://\.\.\.@h holds a user and a password, and there is an API key"):
        Access({"Authorization": "Bearer k"}).at("http://a:b@h")


@pytest.mark.parametrize(
    "words",
    [
        ["profile", f"http://anna:{SECRET}/x@h:1"],
        ["profile", f"anna:{SECRET}@h:1"],
        ["bench", f"ftp://anna:{SECRET}@h:1"],
        ["split", f"http://anna:{SECRET}@h:99999"],
        ["split", "--from", "/nonexistent/x", f"http://anna:{SECRET}@h:1"],
        ["split", "http://h", f"http://anna:{SECRET}@h:1"],
        ["stall", "http://h", "--compare", f"anna:{SECRET}@h:1/"],
        ["profile", "http://h", f"http://anna:{SECRET}@h:1"],
        ["profile", f"http://anna:{SECRET}@127.0.0.1:1"],
        ["bench", f"http://anna:{SECRET}@127.0.0.1:1"],
        ["stall", f"http://anna:{SECRET}@127.0.0.1:1"],
        ["split", f"http://anna:{SECRET}@127.0.0.1:1"],
        ["bench", f"http://anna:{SECRET}@127.0.0.1:1", "--api-key", "k"],
        ["bench", f"http://anna:{SECRET}@127.0.0.1:1", "--dtype", "int8"],
        ["roofline", f"http://anna:{SECRET}@h/config.json"],
        ["compare", f"http://anna:{SECRET}@h/a.json", "b"],
        ["kernels", f"http://anna:{SECRET}@h/a"],
        ["serve", f"http://anna:{SECRET}@h/a", "--port", "0"],
    ],
)
def test_no_line_of_an_error_shows_it(words: list[str]) -> None:
    ended = biphase(*words)
    assert ended.returncode in (1, 2)
    assert no_secret(ended.stdout + ended.stderr), ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("biphase: ")
    assert "Traceback" not in ended.stderr


def test_a_split_sends_it_and_shows_it_nowhere(tmp_path: Path) -> None:
    def locked(path: str, headers: Any) -> Answer:
        return shown(path, headers) if headers.get("Authorization") == BASIC else Answer("no", 401)

    shown = pages(BEFORE, AFTER, Answer("no", 401))
    files = [str(tmp_path / name) for name in ("s.json", "s.html", "s.txt")]
    with metrics_server(locked) as url:
        wrong = biphase("split", url.replace("://", "://anna:s3cr@"), "--for", "300ms")
        options = ["--for", "500ms", "--every", "100ms", "--json", files[0], "--html", files[1], "--save", files[2]]
        ended = biphase("split", with_login(url), *options)
    assert "HTTP 401" in wrong.stderr
    assert "incomplete" in ended.stdout, ended.stderr
    assert json.loads(Path(files[0]).read_text())["command"].startswith("biphase split http://...@127.0.0.1:")
    assert all(
        no_secret(text) for text in (wrong.stderr, ended.stdout, ended.stderr, *(Path(f).read_text() for f in files))
    )


@pytest.mark.parametrize(
    "words",
    [
        ["profile", "--lengths", "4", "--tokens", "3", "--repeats", "2"],
        ["bench", "--workers", "1", "--requests", "4", "--concurrency", "2", "--duration", "5", "--warmup", "0"],
    ],
)
def test_a_measurement_shows_it_nowhere(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biphase.experiments.profile.ROUNDS", 1)
    files = {name: tmp_path / name for name in ("json", "html", "records")}
    if words[0] == "profile":
        files["markdown"] = tmp_path / "markdown"
    named = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    with scripted(first_token_s=0.01, gap_s=0.002) as url:
        ended = biphase(words[0], with_login(url), *words[1:], *named)
    written = [path.read_text() for path in files.values()]
    assert all(no_secret(text) for text in (ended.stdout, ended.stderr, *written))
    assert "http://...@127.0.0.1:" in written[0]
