"""Workloads in files: biphase's own JSON lines, and the published formats of Mooncake and Azure, gzip or plain.

Own format, a request a line: ``{"input_tokens": 900, "output_tokens": 120, "at_s": 3.5, "blocks": [0, 7, 12]}``.
``at_s`` (seconds, rising) is there in all lines or in none; ``blocks`` names the runs of ``block_tokens`` tokens that
the prompt begins with: two prompts that name the same ids begin with the same tokens. A first line
``{"block_tokens": 16}`` sets their length, 512 otherwise.
"""

import gzip
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from biphase.errors import BadInput

MOONCAKE_BLOCK = 512  # tokens of each of its hash_ids
MOST_TOKENS = 10_000_000
AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
_GZIP = b"\x1f\x8b"

T = TypeVar("T")


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a workload: tokens in and out, seconds at which it arrived, ids of the blocks it begins with."""

    input_tokens: int
    output_tokens: int
    at_s: float | None = None
    blocks: tuple[int, ...] = ()


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_tokens: int


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_file(path: Path) -> tuple[list[Item], int]:
    """The requests in a file of any of the formats, and the tokens of a block; ``BadInput`` names the line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the workload {path}: {error.strerror}") from error
    lines = _lines(content, str(path))
    first = lines[0] if lines else ""
    if first.startswith("TIMESTAMP"):
        return _checked(_azure(lines, str(path)), str(path)), MOONCAKE_BLOCK
    if '"input_length"' in first:
        return _checked(_mooncake(lines, str(path)), str(path)), MOONCAKE_BLOCK
    block_tokens, skip = MOONCAKE_BLOCK, 0
    if '"block_tokens"' in first:
        block_tokens, skip = _decode(first, _Head, str(path), 1).block_tokens, 1
        if block_tokens < 1:
            raise BadInput(f"{path}, line 1: block_tokens {block_tokens}: expected 1 or more")
    own = (_decode(line, Item, str(path), n) for n, line in enumerate(lines[skip:], skip + 1) if line.strip())
    return _checked(own, str(path), block_tokens, skip + 1), block_tokens


def azure_items(content: bytes, name: str) -> list[Item]:
    """Requests of a trace of Azure: ``TIMESTAMP,ContextTokens,GeneratedTokens``."""
    return _checked(_azure(_lines(content, name), name), name)


def mooncake_items(content: bytes, name: str) -> list[Item]:
    """Requests of a trace of Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``."""
    return _checked(_mooncake(_lines(content, name), name), name)


def _lines(content: bytes, name: str) -> list[str]:
    try:
        text = (gzip.decompress(content) if content.startswith(_GZIP) else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"{name} is not a workload: neither text nor gzip of text ({error})") from error
    return text.removeprefix("\ufeff").splitlines()


def _decode(line: str, kind: type[T], name: str, number: int) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        wanted = '{"input_tokens": 900, "output_tokens": 120}'
        raise BadInput(f"{name}, line {number}: {error}; expected a request like {wanted}") from error


def _mooncake(lines: Iterable[str], name: str) -> Iterator[Item]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _decode(line, _Mooncake, name, number)
            yield Item(row.input_length, row.output_length, row.timestamp / 1e3, row.hash_ids)


def _azure(lines: Iterable[str], name: str) -> Iterator[Item]:
    start = None
    for number, line in enumerate(lines, 1):
        if number == 1 or not line.strip():
            continue
        try:
            stamp, inputs, outputs = line.split(",")
            at = datetime.fromisoformat(stamp)
            start = start or at
            yield Item(int(inputs), int(outputs), (at - start).total_seconds())
        except (ValueError, TypeError) as error:
            raise BadInput(f"{name}, line {number}: {line[:80]!r} is no row of {AZURE_HEAD}") from error


def _checked(items: Iterable[Item], name: str, block_tokens: int = MOONCAKE_BLOCK, first: int = 1) -> list[Item]:
    """All of them, or ``BadInput`` at the first that cannot be sent."""
    found: list[Item] = []
    for number, item in enumerate(items, first):
        problem = _problem(item, found[-1] if found else None, block_tokens)
        if problem is not None:
            raise BadInput(f"{name}, request {number - first + 1}: {problem}")
        found.append(item)
    if not found:
        raise BadInput(f'{name} holds no request; expected one a line, as {{"input_tokens": 900, ...}}')
    return found


def _problem(item: Item, before: Item | None, block_tokens: int) -> str | None:
    if not (1 <= item.input_tokens <= MOST_TOKENS and 1 <= item.output_tokens <= MOST_TOKENS):
        return f"{item.input_tokens} tokens in and {item.output_tokens} out: expected 1 to {MOST_TOKENS:,} of each"
    if len(item.blocks) > -(-item.input_tokens // block_tokens):
        return f"{len(item.blocks)} blocks of {block_tokens} tokens in a prompt of {item.input_tokens} tokens"
    if item.at_s is not None and not math.isfinite(item.at_s):
        return f"arrives at {item.at_s}: expected seconds"
    if before is not None and (item.at_s is None) != (before.at_s is None):
        return "some requests have a time of arrival and others have none"
    if before is not None and item.at_s is not None and before.at_s is not None and item.at_s < before.at_s:
        return f"arrives at {item.at_s:g} s, before the one above it ({before.at_s:g} s)"
    return None
