"""Counters and gauges from a server's ``/metrics``: what is there, and None for what is not.

Engines spell alike things differently: a counter with or without ``_total``, ``prefix:name`` or, through exporters
that may not write a colon, ``prefix_name``. A name that is missing is None and never 0.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from biphase.client.endpoint import Api, Reply, ask
from biphase.errors import RunFailed
from biphase.redaction import redacted

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
LARGEST = 1e18
"""Of a count or a sum that can be believed: a server that makes a million tokens a second has it after 30,000 years."""
SHOWN = 40
"""Characters that a message quotes of a text that is no exposition."""
_EPOCH = time.time() - time.perf_counter()  # so that differences of times do not follow a clock that is set

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """All samples of one exposition by normalised name and labels; buckets of histograms are left out.

    ``at``: Unix seconds, and ``timed`` when they are the scrape's own rather than its file's. ``process``: differs
    between two starts of a server, None where it tells none. ``odd``: of each name that has one, a sample as it was
    written that no count can be; one that is not finite is not in ``series``.
    """

    series: Mapping[str, Mapping[Labels, float]]
    at: float = 0.0
    timed: bool = True
    process: str | None = None
    url: str = ""
    odd: Mapping[str, str] = field(default_factory=dict)

    def value(self, names: Sequence[str]) -> float | None:
        """The first of ``names`` that is there, summed over its labels (engines, models, data-parallel ranks)."""
        found = next((series for name in names if (series := self.series.get(normal(name)))), None)
        return sum(found.values()) if found is not None else None


def normal(name: str) -> str:
    """One spelling for all of a name."""
    return name.replace(":", "_").removesuffix("_total")


def parse_metrics(text: str) -> Scrape:
    """Read Prometheus' text format; ``ValueError`` for what is none, with the line that is none."""
    found: dict[str, dict[Labels, float]] = {}
    ranks: dict[tuple[str, Labels], tuple[int, ...]] = {}
    odd: dict[str, str] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, IndexError) as error:  # the parser's own words quote what it stumbled on, or nothing
        raise ValueError(_no_metric(text)) from error
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.endswith(_SKIPPED):
            continue
        name, (rank, labels) = normal(sample.name), _identity(sample.labels)
        if not 0 <= sample.value <= LARGEST:
            odd[name] = _written(sample)
        if math.isfinite(sample.value) and rank <= ranks.get((name, labels), rank):
            ranks[name, labels] = rank
            found.setdefault(name, {})[labels] = sample.value
    started = found.get(_PROCESS_SERIES, {}).values()
    return Scrape(found, process=f"{max(started):.2f}" if started else None, odd=odd)


def _written(sample: Sample) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{inside}}} is {sample.value:g}" if inside else f"{sample.name} is {sample.value:g}"


def _no_metric(text: str) -> str:
    """What a user must see of a text that is no exposition: its first line that is none."""
    for line in text.split("\n"):
        try:
            list(text_string_to_metric_families(line))
        except (ValueError, IndexError):
            shown = line.strip()
            return f"{shown[:SHOWN] + '...' if len(shown) > SHOWN else shown!r} is not a name and its value"
    return "its lines do not go together"


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
    return replace(found, at=began + reply.seconds / 2, process=process, url=redacted(url)), text


class NoPageError(ValueError):
    """The answer to a scrape is not one: ``reply`` has its status and body."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"HTTP {reply.status}")
        self.reply = reply
