"""``Record``: one request as seen from outside, immutable.

TTFT, ITL, TPOT and E2E are functions of records (``biphase.analysis.latency``), never stored beside them. Records are
written as JSON lines and can be re-analysed later without the server.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from biphase.client.replaced_file import ReplacedFile
from biphase.errors import BadInput, RunFailed

ChunkKind = Literal["role", "reasoning", "text", "tool", "usage"]
CountSource = Literal["continuous_usage", "usage", "tokenize", "tokenizer", "sent_ids", "chunks", "none"]
"""Where a token count comes from. ``sent_ids``: the prompt went as token ids. ``chunks``: one per chunk, a guess."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
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
    this process before their stamp. ``warmup``: sent before the measurement, no part of its numbers. ``concurrency``:
    requests that the load wanted in flight.
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
    concurrency: int = 1

    @property
    def token_chunks(self) -> tuple[Chunk, ...]:
        """The chunks that carry generated tokens, in order of arrival."""
        return tuple(chunk for chunk in self.chunks if chunk.tokens > 0)


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt length that was not measured, and why."""

    prompt_tokens: int
    reason: str


class ServerCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the server's own counters gained over a run; None where it has no such counter.

    ``prompt_tokens`` is without cached ones where ``cached_left_out``. ``ttft_s`` and ``itl_s``: sum in seconds and
    number of the server's own latencies, which end where its answer leaves it.
    """

    generation_tokens: int
    prompt_tokens: int | None = None
    cached_left_out: bool = False
    ttft_s: tuple[float, int] | None = None
    itl_s: tuple[float, int] | None = None


class RunFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="run", tag_field="line"):
    """What belongs to all records of a run: a line of its own in their file, at the start and, complete, at the end.

    ``own_tokens``: prompt tokens that the server adds to each prompt. ``foreign_tokens``: tokens that the server's
    counters gained beyond this run's own, None where it has no counters. ``command`` holds no key and no header.
    """

    command: str
    versions: dict[str, str]
    started: str
    url: str
    model: str
    tokens: int
    repeats: int
    own_tokens: int
    http_round_trip_s: tuple[float, ...]
    http_round_trip_path: str
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    foreign_tokens: int | None = None
    busy_before: int | None = None
    server: ServerCounts | None = None
    error: str | None = None


Keep = Callable[[Record | RunFacts], None]


@contextmanager
def open_records(path: Path) -> Iterator[Keep]:
    """A file of records, one JSON line each, written as they come: a run that breaks off keeps what it measured.

    What was there is replaced by the first line: a run that measures nothing costs no earlier file. When the disk is
    full ``keep`` raises ``RunFailed`` once and is then silent, so that the run can end with its table.
    """
    encoder = msgspec.json.Encoder()
    try:
        file = ReplacedFile(path)
    except OSError as error:
        raise BadInput(f"cannot write records to {path}: {error.strerror}") from error
    failed = False

    def keep(line: Record | RunFacts) -> None:
        nonlocal failed
        if failed:
            return
        try:
            file.write(encoder.encode(line) + b"\n")
        except OSError as error:
            failed = True
            raise RunFailed(f"cannot write records to {path}: {error.strerror}") from error

    with file:
        yield keep


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines, one a line."""
    with open_records(path) as keep:
        for record in records:
            keep(record)


def read_records(path: Path) -> Iterator[Record]:
    """The records in a file; a line that is none raises ``BadInput`` with its number."""
    return (line for line in _lines(path) if isinstance(line, Record))


def read_run(path: Path) -> tuple[RunFacts | None, list[Record]]:
    """The last facts of a run in a file of records, if there are any, and its records."""
    lines = list(_lines(path))
    facts = [line for line in lines if isinstance(line, RunFacts)]
    return (facts[-1] if facts else None), [line for line in lines if isinstance(line, Record)]


def _lines(path: Path) -> Iterator[Record | RunFacts]:
    records, facts = msgspec.json.Decoder(Record), msgspec.json.Decoder(RunFacts)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read records from {path}: {error.strerror}") from error
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            yield facts.decode(line) if line.startswith(b'{"line":') else records.decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise BadInput(f"{path}, line {number}: not a biphase record: {error}") from error
