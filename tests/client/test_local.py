"""Servers on the usual ports: found, named, and listed when there are several."""

import asyncio
from urllib.parse import urlsplit

import pytest

from biphase.client.endpoint import Access
from biphase.client.local import Found, find_local, only_one
from biphase.errors import RunFailed
from tests.scripted_server import scripted


def test_servers_are_found_by_their_list_of_models() -> None:
    with scripted(models=("a", "b")) as first, scripted() as second, scripted(has_models=False) as none:
        ports = {urlsplit(url).port or 0: product for url, product in ((first, "X"), (second, "Y"), (none, "Z"))}
        found = asyncio.run(find_local(Access(timeout_s=5), {**ports, 1: "nobody"}))
    assert found == [Found(first, "X", ("a", "b")), Found(second, "Y", ("scripted",))]


def test_one_is_taken_and_anything_else_is_said() -> None:
    one = Found("http://127.0.0.1:8000", "vLLM", ("m",))
    assert only_one([one]) is one
    with pytest.raises(RunFailed, match=r"no OpenAI-compatible server .*vLLM 8000, .*Ollama 11434"):
        only_one([])
    with pytest.raises(RunFailed, match=r"2 servers .*http://127.0.0.1:8000 \(vLLM's port\): m; .*Ollama's port"):
        only_one([one, Found("http://127.0.0.1:11434", "Ollama", ())])
