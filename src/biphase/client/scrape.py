"""Counters and gauges from a server's ``/metrics``: what is there, and None for what is not.

Engines spell alike things differently: a counter with or without ``_total``, ``prefix:name`` or, through exporters
that may not write a colon, ``prefix_name``. A name that is missing is None and never 0.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from biphase.client.endpoint import Api, Reply, ask
from biphase.client.replaced_file import ReplacedFile
from biphase.errors import BadInput, RunFailed

PATHS = ("/metrics", "/prometheus/metrics")  # the second is TensorRT-LLM's

GENERATED = (
    "vllm:generation_tokens",
    "sglang:generation_tokens",
    "llamacpp:tokens_predicted",
    "trtllm_generation_tokens",
)
PROMPTED = ("vllm:prompt_tokens", "sglang:prompt_tokens", "trtllm_prompt_tokens")
PROMPTED_UNCACHED = ("llamacpp:prompt_tokens",)  # cached tokens left out
TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds", "trtllm_time_to_first_token_seconds")
ITL = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",  # its name before
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
    "trtllm_time_per_output_token_seconds",
)
RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "trtllm_num_requests_running",
    "tgi_batch_current_size",
)
_OWN_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")  # one number reported by each rank of a model: taken once
_SKIPPED = ("_bucket", "_created")
_PROCESS_HEADER = "Process-Start-Time-Unix"  # llama.cpp's; not seconds in every build, yet another in every process
_PROCESS_SERIES = "process_start_time_seconds"
_HEAD = "# biphase scrape "
"""Begins each scrape in a file: Unix seconds, the process or -, the URL; to others it is a comment."""
_EPOCH = time.time() - time.perf_counter()  # so that differences of times do not follow a clock that is set

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """All samples of one exposition by normalised name and labels; buckets of histograms are left out.

    ``at``: Unix seconds, and ``timed`` when they are the scrape's own rather than its file's. ``process``: differs
    between two starts of a server, None where it tells none.
    """

    series: Mapping[str, Mapping[Labels, float]]
    at: float = 0.0
    timed: bool = True
    process: str | None = None
    url: str = ""

    def value(self, names: Sequence[str]) -> float | None:
        """The first of ``names`` that is there, summed over its labels (engines, models, data-parallel ranks)."""
        found = next((series for name in names if (series := self.series.get(normal(name)))), None)
        return sum(found.values()) if found is not None else None


def normal(name: str) -> str:
    """One spelling for all of a name."""
    return name.replace(":", "_").removesuffix("_total")


def parse_metrics(text: str) -> Scrape:
    """Read Prometheus' text format; ``ValueError`` for what is none."""
    found: dict[str, dict[Labels, float]] = {}
    ranks: dict[tuple[str, Labels], tuple[int, ...]] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except IndexError as error:  # what the parser says of some lines that are none
        raise ValueError("not a line of metrics") from error
    for family in families:
        for sample in family.samples:
            if sample.name.endswith(_SKIPPED) or not math.isfinite(sample.value):
                continue
            name, (rank, labels) = normal(sample.name), _identity(sample.labels)
            if rank <= ranks.get((name, labels), rank):
                ranks[name, labels] = rank
                found.setdefault(name, {})[labels] = sample.value
    started = found.get(_PROCESS_SERIES, {}).values()
    return Scrape(found, process=f"{max(started):.2f}" if started else None)


def _identity(labels: Mapping[str, str]) -> tuple[tuple[int, ...], Labels]:
    """The ranks within a model that a sample comes from, and what it is a sample of."""
    rank = tuple(int(text) if (text := labels.get(name, "")).isdecimal() else 0 for name in _OWN_RANKS)
    return rank, tuple(sorted(item for item in labels.items() if item[0] not in _OWN_RANKS))


async def scrape(session: aiohttp.ClientSession, api: Api) -> Scrape | None:
    """What the server counts at this moment; None where it has no such page."""
    for path in PATHS:
        try:
            found, _ = await fetch(session, f"{api.root}{path}")
        except (RunFailed, ValueError):
            continue
        if found.series:
            return found
    return None


async def fetch(session: aiohttp.ClientSession, url: str) -> tuple[Scrape, str]:
    """A page of metrics and its text; ``ValueError`` where the answer is no such page, ``RunFailed`` where none is."""
    began = _EPOCH + time.perf_counter()
    reply = await ask(session, url)
    if reply.status != 200:
        raise NoPageError(reply)
    text = reply.body.decode("utf-8", "replace")
    found = parse_metrics(text)
    process = reply.headers.get(_PROCESS_HEADER, found.process)
    return replace(found, at=began + reply.seconds / 2, process=process, url=url), text


class NoPageError(ValueError):
    """The answer to a scrape is not one: ``reply`` has its status and body."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"HTTP {reply.status}")
        self.reply = reply


KeepScrape = Callable[[Scrape, str], None]


@contextmanager
def save_scrapes(path: Path) -> Iterator[KeepScrape]:
    """A file of scrapes as the server wrote them, each below a comment on when and where; written as they come."""
    try:
        file = ReplacedFile(path)
    except OSError as error:
        raise BadInput(f"cannot write scrapes to {path}: {error.strerror}") from error

    def keep(found: Scrape, text: str) -> None:
        head = f"{_HEAD}{found.at:.3f} {found.process or '-'} {found.url}"
        try:
            file.write(f"{head}\n{text.rstrip()}\n".encode())
        except OSError as error:
            raise RunFailed(f"cannot write scrapes to {path}: {error.strerror}") from error

    with file:
        yield keep


def read_scrapes(paths: Sequence[Path]) -> list[Scrape]:
    """All scrapes in files that ``save_scrapes`` or a plain download wrote, in the order of their times.

    A download has no time but its file's: such scrapes stay in the order given.
    """
    found = [one for path in paths for one in _in_file(path)]
    return sorted(found, key=lambda one: one.at) if all(one.timed for one in found) else found


def _in_file(path: Path) -> Iterator[Scrape]:
    try:
        text, changed = path.read_bytes().decode("utf-8", "replace"), path.stat().st_mtime
    except OSError as error:
        raise BadInput(f"cannot read scrapes from {path}: {error.strerror}") from error
    plain, *saved = f"\n{text}".split(f"\n{_HEAD}")
    if plain.strip() or not saved:
        yield replace(_parse_file(path, plain), at=changed, timed=False)
    for part in saved:
        head, _, exposition = part.partition("\n")
        yield _with_head(_parse_file(path, exposition), head, path)


def _parse_file(path: Path, text: str) -> Scrape:
    try:
        found = parse_metrics(text)
    except ValueError as error:
        raise BadInput(f"{path} is not metrics text in Prometheus' format ({error})") from error
    if not found.series:
        raise BadInput(f"{path} holds no metrics; expected the text of a server's /metrics")
    return found


def _with_head(found: Scrape, head: str, path: Path) -> Scrape:
    words = head.split(" ", 2)
    try:
        at, process, url = float(words[0]), words[1], words[2]
        datetime.fromtimestamp(at, UTC)
    except (ValueError, IndexError, OverflowError, OSError) as error:
        raise BadInput(f"{path}: not a line that begins a scrape: {_HEAD + head!r}") from error
    return replace(found, at=at, process=None if process == "-" else process, url=url)
