"""What the server's process and the engine's process say to each other: msgpack frames over one socket pair.

The engine's process owns the model and the scheduler; HTTP, the tokenizer and the detokenizer live in the server's,
because a busy Python thread beside the step loop costs a step up to 5 ms (the interpreter's switch interval).
Importing this module loads no torch.
"""

import struct
from typing import BinaryIO, Literal

import msgspec

from biphase.scheduling.request import SamplingParams, TokenLogprobs

HEADER = struct.Struct("<I")
"""Each frame is its length in bytes (4 bytes, little-endian) and a msgpack body."""


class Submit(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Server to engine: run this prompt. Everything was checked before it is sent; a lower ``priority`` goes first."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: SamplingParams
    priority: int = 0


class SubmitAll(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Server to engine: the choices of one HTTP request, which are taken or refused together."""

    submits: tuple[Submit, ...]


class Vocabulary(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Server to engine, once, before any request with a grammar: the tokenizer as the text of a tokenizer.json, the
    bytes of each token id (control tokens have none), which ids are control tokens, and the ends of sequence."""

    tokenizer: str
    tokens: tuple[bytes, ...]
    control: tuple[int, ...]
    eos: tuple[int, ...]


class Abort(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Server to engine: the client went away or a stop string matched. Idempotent, valid in every state."""

    id: str


class Ready(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Engine to server, once: the model is loaded. ``max_model_len`` is capped to what the KV pool holds."""

    max_model_len: int
    vocab_size: int
    dtype: str
    kv_dtype: str
    num_blocks: int
    block_size: int
    load_seconds: float
    crossover_rows: int | None = None


class Fatal(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Engine to server: it cannot go on. ``exit_code`` as in biphase.errors (2 for bad input)."""

    message: str
    exit_code: int


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New tokens of one request after a step; ``finish_reason`` (stop, length, abort, error) comes with the last.

    A request that ends on a stop id ends with that id among ``tokens``: it was generated and counts as usage.
    ``logprobs`` is one for each token where they were asked for. The first tokens come with ``cached_tokens``, the
    prompt tokens that the prefix cache gave, and ``queue_seconds``, from arrival in the engine to the first step that
    ran it. An ``error_code`` tells a refusal from a failure: ``queue_full`` comes with ``retry_after`` in seconds
    where it can be guessed, ``rejected`` says that this request could never run.
    """

    id: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    error_code: Literal["queue_full", "rejected"] | None = None
    retry_after: float | None = None


class Step(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Engine to server after each step: its outputs, its token counts by phase, and the state of the queues.

    From ``prefill_seconds`` on, totals since the start: engine-seconds of each phase, and ``cache_queries`` and
    ``cache_hits`` in prompt tokens.
    """

    outputs: tuple[Output, ...]
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    kv_usage: float
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0


ToEngine = Vocabulary | Submit | SubmitAll | Abort
ToServer = Ready | Fatal | Step

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode


def pack(message: ToEngine | ToServer) -> bytes:
    """One frame, header and body."""
    body = encode(message)
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame of a blocking stream, or None when the other side has closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None
