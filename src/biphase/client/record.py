"""``Record``: one request as seen from outside, immutable.

TTFT, ITL, TPOT and E2E are functions of records (``biphase.analysis.latency``), never stored beside them. Records are
written as JSON lines and can be re-analysed later without the server.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from biphase.errors import BadInput

ChunkKind = Literal["role", "reasoning", "text", "tool", "usage"]
CountSource = Literal["continuous_usage", "usage", "tokenize", "tokenizer", "sent_ids", "chunks", "none"]
"""Where a token count comes from. ``sent_ids``: the prompt went as token ids. ``chunks``: one per chunk, a guess."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One event of the stream: seconds on the record's clock when its bytes arrived, its tokens, its kind.

    A chunk that carries no generated token (role, usage, a bare finish reason, an empty text) has ``tokens`` 0.
    """

    t: float
    tokens: int
    kind: ChunkKind


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All times are seconds on one monotonic clock of the client; counts are tokens.

    ``intended``: when the load wanted the request to go out; ``sent``: when its connection was open and it did.
    ``first_byte``: the head of the response. ``completion_tokens_source`` holds for the chunks' tokens too: with
    ``continuous_usage`` each chunk's count is the server's; with ``usage`` the total is, spread over the chunks by
    length of text where the two differ. ``client_lag``: the longest that any bytes of this stream can have waited for
    this process before their stamp. ``warmup``: sent before the measurement, no part of its numbers.
    """

    id: str
    intended: float
    sent: float
    first_byte: float | None = None
    chunks: tuple[Chunk, ...] = ()
    ended: float | None = None
    prompt_tokens: int | None = None
    prompt_tokens_source: CountSource = "none"
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_source: CountSource = "none"
    asked_prompt_tokens: int | None = None
    asked_completion_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    client_lag: float = 0.0
    warmup: bool = False

    @property
    def token_chunks(self) -> tuple[Chunk, ...]:
        """The chunks that carry generated tokens, in order of arrival."""
        return tuple(chunk for chunk in self.chunks if chunk.tokens > 0)


Keep = Callable[[Record], None]


@contextmanager
def open_records(path: Path) -> Iterator[Keep]:
    """A file of records, one JSON line each, flushed as they come: a run that breaks off keeps what it measured."""
    encoder = msgspec.json.Encoder()
    try:
        file = path.open("wb")
    except OSError as error:
        raise BadInput(f"cannot write records to {path}: {error.strerror}") from error
    with file:

        def keep(record: Record) -> None:
            file.write(encoder.encode(record) + b"\n")
            file.flush()

        yield keep


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines, one a line."""
    with open_records(path) as keep:
        for record in records:
            keep(record)


def read_records(path: Path) -> Iterator[Record]:
    """Read what ``write_records`` wrote; a line that is not a record raises ``BadInput`` with its number."""
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield decoder.decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise BadInput(f"{path}, line {number}: not a biphase record: {error}") from error
