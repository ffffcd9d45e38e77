"""Counters and gauges from a server's ``/metrics``: what is there, and None for what is not.

Engines spell alike things differently: a counter with or without ``_total``, ``prefix:name`` or, through exporters
that may not write a colon, ``prefix_name``. A name that is missing is None and never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from biphase.client.endpoint import Api, ask
from biphase.errors import RunFailed

PATHS = ("/metrics", "/prometheus/metrics")  # the second is TensorRT-LLM's

GENERATED = (
    "vllm:generation_tokens",
    "sglang:generation_tokens",
    "llamacpp:tokens_predicted",
    "trtllm_generation_tokens",
)
RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "trtllm_num_requests_running",
    "tgi_batch_current_size",
)
_OWN_RANKS = ("tp_rank", "pp_rank")  # one number reported by each rank of a model: taken once


@dataclass(frozen=True)
class Scrape:
    """All samples of one exposition, by normalised name."""

    samples: Mapping[str, float]

    def value(self, names: Sequence[str]) -> float | None:
        """The first of ``names`` that is there, summed over its labels (engines, models, data-parallel ranks)."""
        return next((self.samples[key] for name in names if (key := _normal(name)) in self.samples), None)


def _normal(name: str) -> str:
    return name.replace(":", "_").removesuffix("_total")


def parse_metrics(text: str) -> Scrape:
    """Read Prometheus' text format; ``ValueError`` for what is none."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if all(sample.labels.get(rank, "0") == "0" for rank in _OWN_RANKS) and not sample.name.endswith("_created"):
                sums[_normal(sample.name)] = sums.get(_normal(sample.name), 0.0) + sample.value
    return Scrape(sums)


async def scrape(session: aiohttp.ClientSession, api: Api) -> Scrape | None:
    """What the server counts at this moment; None where it has no such page."""
    for path in PATHS:
        try:
            reply = await ask(session, f"{api.root}{path}")
            found = parse_metrics(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None
        except (RunFailed, ValueError):
            continue
        if found is not None and found.samples:
            return found
    return None
