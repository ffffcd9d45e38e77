"""What the server counted itself beside what the client saw: tokens, and the share of the network in both latencies."""

from collections.abc import Sequence

import msgspec

from biphase.analysis.latency import prefilled_tokens, ttft
from biphase.client.record import Record, ServerCounts


class ServerSide(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Means over all requests of the run, warm-ups and batches too, because the server's counters hold those as well.

    ``agree``: the server counted exactly the tokens of this run, None where it does not count both. What the client's
    means have beyond the server's is the share of network and HTTP: ``network_ttft_ms``, ``network_itl_ms``.
    """

    prompt_tokens: int | None
    generation_tokens: int
    own_prompt_tokens: int
    own_generation_tokens: int
    agree: bool | None
    ttft_mean_ms: float | None
    itl_mean_ms: float | None
    network_ttft_ms: float | None
    network_itl_ms: float | None


def server_side(counts: ServerCounts | None, records: Sequence[Record]) -> ServerSide | None:
    """None where the server has no counters."""
    if counts is None:
        return None
    prompted = sum((prefilled_tokens(r) if counts.cached_left_out else r.prompt_tokens) or 0 for r in records)
    generated = sum(r.completion_tokens or 0 for r in records)
    exact = (counts.prompt_tokens, counts.generation_tokens) == (prompted, generated)
    first, gap = _mean_ms(counts.ttft_s), _mean_ms(counts.itl_s)
    return ServerSide(
        prompt_tokens=counts.prompt_tokens,
        generation_tokens=counts.generation_tokens,
        own_prompt_tokens=prompted,
        own_generation_tokens=generated,
        agree=exact if counts.prompt_tokens is not None else None,
        ttft_mean_ms=first,
        itl_mean_ms=gap,
        network_ttft_ms=_beyond(_client_ttft_ms(records), first),
        network_itl_ms=_beyond(_client_itl_ms(records), gap),
    )


def _mean_ms(latencies: tuple[float, int] | None) -> float | None:
    return 1e3 * latencies[0] / latencies[1] if latencies and latencies[1] else None


def _beyond(client: float | None, server: float | None) -> float | None:
    return client - server if client is not None and server is not None else None


def _client_ttft_ms(records: Sequence[Record]) -> float | None:
    found = [seconds for r in records if (seconds := ttft(r)) is not None]
    return 1e3 * sum(found) / len(found) if found else None


def _client_itl_ms(records: Sequence[Record]) -> float | None:
    chunks = [r.token_chunks for r in records if r.token_chunks]
    tokens = sum(chunk.tokens for stream in chunks for chunk in stream[1:])
    return 1e3 * sum(stream[-1].t - stream[0].t for stream in chunks) / tokens if tokens else None
