"""Counting and naming tokens with the server's own tokenizer, through its /tokenize route, or with one that is here."""

from collections.abc import Callable

import aiohttp

from biphase.client.endpoint import Api, ask
from biphase.errors import RunFailed


async def find_tokenizer(session: aiohttp.ClientSession, api: Api) -> "Tokenizer | None":
    """The form of /tokenize that this server understands, or None when it has none of them."""
    # vLLM and SGLang, llama.cpp, TGI
    forms = (
        {"model": api.model, "add_special_tokens": False, "": "prompt"},
        {"add_special": False, "": "content"},
        {"add_special_tokens": False, "": "inputs"},
    )
    for form in forms:
        tokenizer = Tokenizer(session, f"{api.root}/tokenize", {k: v for k, v in form.items() if k}, str(form[""]))
        if await tokenizer.ids("the time") is not None:
            return tokenizer
    return None


class Tokenizer:
    """One server's /tokenize; ``ids`` gives token ids of a text without special tokens."""

    def __init__(self, session: aiohttp.ClientSession, url: str, options: dict[str, object], key: str) -> None:
        self._session, self._url, self._options, self._key = session, url, options, key

    async def ids(self, text: str) -> list[int] | None:
        """Token ids of a text, or None when the server does not answer with a list of them."""
        try:
            reply = await ask(self._session, self._url, {**self._options, self._key: text})
        except RunFailed:
            return None
        return _ids_in(reply.json()) if reply.status == 200 else None


class LocalTokenizer:
    """A tokenizer of this machine, for a server that neither counts nor has one: ``encode`` gives ids of a text."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    async def ids(self, text: str) -> list[int] | None:
        """Token ids of a text, without special tokens."""
        return self._encode(text)


def _ids_in(answer: object) -> list[int] | None:
    # {"tokens": [1, 2]} (vLLM, SGLang, llama.cpp), [{"id": 1, ...}] (TGI)
    listed = answer.get("tokens") if isinstance(answer, dict) else answer
    if not isinstance(listed, list):
        return None
    ids = [item.get("id") if isinstance(item, dict) else item for item in listed]
    return [i for i in ids if isinstance(i, int)] if ids and all(isinstance(i, int) for i in ids) else None
