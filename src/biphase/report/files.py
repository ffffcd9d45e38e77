"""A profile as files for others: JSON with units in its keys and vLLM's bench keys beside them, and Markdown."""

from collections.abc import Iterator

import msgspec

from biphase.analysis.latency import Spread
from biphase.analysis.profile_result import LengthRow, ProfileResult
from biphase.report.laws_text import law_lines
from biphase.report.pretty_json import pretty_json
from biphase.report.tables import cell, conditions, short_model, tokens_cell
from biphase.report.words import plain_words


def json_bytes(result: ProfileResult) -> bytes:
    """The result, and at its top level the keys of ``vllm bench serve`` that a profile has a value for."""
    content = msgspec.to_builtins(result)
    content |= content.pop("vllm_bench")
    return pretty_json(content)


def markdown(result: ProfileResult) -> str:
    """The profile as a comment for an issue or a post."""
    return "\n".join(_markdown_lines(result)) + "\n"


def _markdown_lines(result: ProfileResult) -> Iterator[str]:
    yield f"**{short_model(result)}** at {result.url}, measured by biphase {result.biphase}, {result.started}"
    yield ""
    for verdict in result.verdicts:
        yield f"> **{verdict.name}**: {verdict.sentence}; {verdict.advice}"
        yield ">"
    yield " ".join(plain_words(result))
    yield ""
    yield "| prompt tokens | prefill ms | prefill tok/s | decode ms/token | decode tok/s |"
    yield "|--:|--:|--:|--:|--:|"
    for row in result.rows:
        yield f"| {tokens_cell(row)} | {' | '.join(map(cell, _values(row)))} |"
    yield ""
    for line in (*law_lines(result), *conditions(result)):
        yield f"- {line}"
    yield f"- `{result.command}`"


def _values(row: LengthRow) -> tuple[Spread | None, ...]:
    return row.ttft_ms, row.prefill_tok_per_s, row.decode_ms_per_token, row.decode_tok_per_s
