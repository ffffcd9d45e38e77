"""A stall as sentences: what the streams felt, how the server chunks, which chunk would keep a wanted ITL."""

from collections.abc import Iterator
from pathlib import PurePath

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.chunk_advice import ChunkAdvice
from biphase.analysis.chunk_size import Chunking
from biphase.analysis.stall_result import ServerStall, StallResult
from biphase.report.words import number

UNFELT = 1.5
"""Times the quiet gap below which nobody notices the worst one."""


def short_name(server: ServerStall) -> str:
    """The model's name; llama.cpp names a file."""
    return PurePath(server.model).name if server.model.startswith("/") else server.model


def title(result: StallResult) -> str:
    """What was done, in a line, or what was to be done where no prompt had come when a run broke off."""
    streams = max((s.victims for s in result.servers), default=0)
    if not streams:
        asked = "1 stream was" if result.victims == 1 else f"{result.victims} streams were"
        return f"{asked} to decode while a prompt of {result.prompt_tokens:,} tokens arrives"
    lengths = sorted({s.prompt_tokens for s in result.servers if s.prompt_tokens}) or [result.prompt_tokens]
    length = " or ".join(f"{n:,}" for n in lengths)
    times = "once" if result.repeats == 1 else f"{result.repeats} times"
    return f"{_streams(streams)} while a prompt of {length} tokens arrives, {times}"


def _streams(count: int) -> str:
    return "1 stream decodes" if count == 1 else f"{count} streams decode"


def stall_words(server: ServerStall) -> Iterator[str]:
    """A few sentences that a person can repeat; none where nothing was measured."""
    if server.prefill_gap_ms is None or server.quiet_gap_ms is None:
        return
    yield _felt(server)
    if (chunks := _chunks(server)) is not None:
        yield chunks
    if server.advice is not None:
        yield from _advice(server.advice, server)


def _felt(server: ServerStall) -> str:
    quiet, during, stalled = server.quiet_gap_ms, server.prefill_gap_ms, server.stalled_s_per_stream
    assert quiet is not None
    assert during is not None
    if during.worst < UNFELT * quiet.median:
        return (
            f"The streams hardly noticed the prompt: worst gap {number(during.worst)} ms, "
            f"quiet ITL {number(quiet.median)} ms."
        )
    if not server.worst_over_quiet:
        return (
            f"While the prompt was prefilled a stream waited up to {number(during.worst)} ms for its next token; most "
            "quiet gaps are nothing at all, so tokens come in bursts and nothing can be said of the ITL."
        )
    held = f"; each prefill held a stream up for {number(stalled.median)} s in all" if stalled else ""
    return (
        f"While the prompt was prefilled a stream waited up to {number(during.worst)} ms for its next token, "
        f"{server.worst_over_quiet:.1f} times the quiet ITL of {number(quiet.median)} ms{held}."
    )


def _chunks(server: ServerStall) -> str | None:
    found = server.chunking
    if found is None:
        return None
    if found.chunk_tokens is None:
        longest = max(count.prompt_tokens for count in found.counts)
        return (
            f"The server prefills {longest:,} tokens in one piece, or lets no decode between its chunks: the streams "
            "got no token until it was done."
        )
    if not found.single_size:
        passes = ", ".join(f"{c.passes} for {c.prompt_tokens:,} tokens" for c in found.counts)
        return f"The server chunks, but no single size explains its passes ({passes}): it sizes chunks by time, or so."
    if not found.found:
        return (
            f"The server prefills in more than one piece; the size of its chunks was not found: any from "
            f"{found.least:,} to {found.most:,} tokens explains what was counted ({_passes(found)})."
        )
    return (
        f"The server prefills in chunks of about {found.chunk_tokens:,} tokens ({found.least:,} to {found.most:,}; "
        f"{_passes(found)}); with {server.victims} decodes in each step that is a budget of about "
        f"{found.chunk_tokens + server.victims:,} tokens."
    )


def _passes(found: Chunking) -> str:
    longest = max(found.counts, key=lambda count: count.prompt_tokens)
    agree = f"{found.agree} of {len(found.counts)} counts agree"
    return f"{longest.passes} passes for {longest.prompt_tokens:,} tokens, {agree}"


def _advice(found: ChunkAdvice, server: ServerStall) -> Iterator[str]:
    wanted = f"{found.itl_slo_ms:g} ms"
    if found.chunk_tokens is None:
        yield (
            f"No chunk keeps an ITL of {wanted}: a decode step of these {server.victims} streams alone takes "
            f"{number(found.quiet_itl_ms)} ms, and a pass with prefill {number(found.pass_floor_ms)} ms before its "
            "first token."
        )
    elif not found.found:
        yield _not_found(found.chunk_tokens, wanted)
    elif found.chunk_tokens.value >= found.prompt_tokens:
        yield f"By the measured law even the whole prompt keeps an ITL of {wanted}."
    else:
        chunk, low, high = found.chunk_tokens.value, found.chunk_tokens.low, found.chunk_tokens.high
        yield (
            f"To keep an ITL of {wanted}: chunks of {chunk:,.0f} tokens [{low:,.0f}, {high:,.0f}] by the measured law, "
            f"a budget of {chunk + server.victims:,.0f} with the decodes; the prompt's TTFT is then "
            f"{number(found.ttft_ms or 0.0)} ms (alone, on the server as it is, {number(found.ttft_alone_ms)} ms)."
        )
    if found.worst_gap_ms is not None and server.prefill_gap_ms is not None:
        yield (
            f"Check of that law: it gives a worst gap of {number(found.worst_gap_ms)} ms for the server as it is; "
            f"measured {number(server.prefill_gap_ms.worst)} ms."
        )


def _not_found(chunk: Estimate, wanted: str) -> str:
    safe = f", and {chunk.low:,.0f} keep it in any case" if chunk.low >= 1 else ""
    return (
        f"No chunk size for an ITL of {wanted} was found: the measured law allows anything from {chunk.low:,.0f} to "
        f"{chunk.high:,.0f} tokens{safe}; measure when it is quiet, or a longer --prompt."
    )


def stall_conditions(result: StallResult) -> Iterator[str]:
    """What the numbers mean and how they were made."""
    measured = [s for s in result.servers if s.attacks]
    if not measured:
        return
    yield (
        "quiet: all streams decode and no prompt has come; p99 and worst gap: between two chunks of a stream while the "
        "prompt is prefilled, all streams and repeats pooled, none averaged"
    )
    yield (
        "stalled s: the excess of a stream's gaps over the quiet median, summed over one prefill; TTFT: of the long "
        "prompt beside the streams; alone: with nothing beside it"
    )
    lag = max(s.client_lag_ms for s in measured)
    yield f"stamps of the client lag by {lag:.2f} ms at most"
    yield from dict.fromkeys(note for s in measured for note in s.notes)
