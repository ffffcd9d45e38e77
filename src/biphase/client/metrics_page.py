"""Where a server's page of metrics is, and what to do where there is none."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from biphase.client.endpoint import Reply, ask, parse_url, root_of
from biphase.client.failures import explain_status, server_message
from biphase.client.scrape import PATHS, NoPageError, Scrape, fetch
from biphase.errors import RunFailed

SWITCHES = (
    "switch them on (SGLang: --enable-metrics; llama.cpp: --metrics; TensorRT-LLM: return_perf_metrics), or give the "
    "address of the page itself"
)
OLLAMA = (
    "Ollama has no metrics; each of its native replies has prompt_eval_duration and eval_duration (ns), and from "
    "outside biphase profile {url} measures both phases"
)


def metrics_urls(url: str) -> tuple[str, ...]:
    """Where the page may be, likeliest first: beside the API, then at the root of the host; or the page itself."""
    base = parse_url(url)
    if urlsplit(base).path.endswith("/metrics"):
        return (base,)
    roots = dict.fromkeys((root_of(base), urlunsplit((*urlsplit(base)[:2], "", "", ""))))
    return tuple(f"{root}{path}" for root in roots for path in PATHS)


@dataclass(frozen=True)
class Page:
    """A page of metrics that was found, and what it held then."""

    url: str
    scrape: Scrape
    text: str


async def find_page(session: aiohttp.ClientSession, url: str) -> Page:
    """The page of metrics of a server; ``RunFailed`` says why there is none, and what to do.

    An empty page is one: TGI shows a name only once it has something to count.
    """
    refusals: list[tuple[str, Reply | None]] = []
    for candidate in metrics_urls(url):
        try:
            found, text = await fetch(session, candidate)
        except NoPageError as error:
            refusals.append((candidate, error.reply))
        except ValueError:
            refusals.append((candidate, None))
        else:
            return Page(candidate, found, text)
    raise RunFailed(await _explain(session, url, refusals))


async def _explain(session: aiohttp.ClientSession, url: str, refusals: Sequence[tuple[str, Reply | None]]) -> str:
    for candidate, reply in refusals:
        if reply is not None and reply.status in (401, 403, 429):
            return explain_status(reply.status, reply.body, candidate)
        if reply is not None and reply.status >= 500:  # llama.cpp: 501 without --metrics, 503 while it loads
            advice = f"; {SWITCHES}" if reply.status == 501 else ""
            return f"{candidate}: HTTP {reply.status}: {server_message(reply.body)}{advice}"
    if await _is_ollama(session, url):
        return OLLAMA.format(url=parse_url(url))
    tried = ", ".join(urlsplit(candidate).path for candidate, _ in refusals)
    first, reply = refusals[0]
    what = f"HTTP {reply.status}" if reply is not None else "not metrics in Prometheus' text format"
    return f"{first}: {what}; no metrics at {tried}; {SWITCHES}"


async def _is_ollama(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        reply = await ask(session, f"{root_of(parse_url(url))}/api/version")
    except RunFailed:
        return False
    answer = reply.json() if reply.status == 200 else None
    return isinstance(answer, dict) and set(answer) == {"version"}
